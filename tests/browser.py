"""Headless Chromium for tests of HTML pages, without network, and with the accessibility checks of axe-core."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, sync_playwright

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='Chromium is not installed: apt-get install chromium')


@contextmanager
def browser_context(**options) -> Iterator[tuple[BrowserContext, list[str]]]:
    """Open a browser; yield a context and a list of the requests that left the page, which stays empty if none did.

    A request leaves the page unless it is for a file, embedded data, or a server on localhost. `options` are those of
    playwright's `Browser.new_context`, such as `viewport` or `color_scheme`.
    """
    left: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        context = browser.new_context(**options)

        def check(route) -> None:
            url = urlsplit(route.request.url)
            if url.scheme in ('file', 'data', 'blob') or url.hostname in ('localhost', '127.0.0.1'):
                route.continue_()
            else:
                left.append(route.request.url)
                route.abort()

        context.route('**/*', check)
        yield context, left
        browser.close()


def serious_issues(page: Page) -> list[str]:
    """Return the serious and critical accessibility issues that axe-core finds on a page."""
    violations = Axe().run(page).response['violations']
    return [
        f'{each["id"]}: {each["help"]} ({node["html"]})'
        for each in violations
        if each['impact'] in ('serious', 'critical')
        for node in each['nodes']
    ]
