"""An S3 API on localhost, moto's, that fails on demand."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = {'aws_access_key_id': 'test', 'aws_secret_access_key': 'test'}


@dataclass
class Store:
    """A running S3 server; `client` is boto3's."""

    client: Any
    faults: list[tuple[str, int | str]] = field(default_factory=list)
    """What the next requests whose path or query has the text are answered: a status, or `cut` for half a body."""
    requests: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Empty it, and let it work."""
        self.faults.clear()
        self.requests.clear()
        for bucket in self.client.list_buckets()['Buckets']:
            pages = self.client.get_paginator('list_objects_v2').paginate(Bucket=bucket['Name'])
            for found in [found for page in pages for found in page.get('Contents', ())]:
                self.client.delete_object(Bucket=bucket['Name'], Key=found['Key'])
            self.client.delete_bucket(Bucket=bucket['Name'])

    def bucket(self, name: str, **objects: bytes) -> str:
        self.client.create_bucket(Bucket=name)
        for key, body in objects.items():
            self.client.put_object(Bucket=name, Key=key, Body=body)
        return f's3://{name}'


class FaultyApp:
    """Passes requests on to a WSGI app, but for those that are to fail."""

    def __init__(self, app: Callable[..., Any], faults: list[tuple[str, int | str]], requests: list[str]) -> None:
        self.app, self.faults, self.requests = app, faults, requests

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = f'{environ["REQUEST_METHOD"]} {environ["PATH_INFO"]}?{environ["QUERY_STRING"]}'
        self.requests.append(request)
        fault = next((fault for fault in self.faults if fault[0] in request), None)
        if fault is None:
            return self.app(environ, start_response)
        self.faults.remove(fault)
        if fault[1] == 'cut':
            body = b''.join(self.app(environ, start_response))
            return [body[: len(body) // 2]]
        code = {403: 'AccessDenied', 500: 'InternalError'}[int(fault[1])]
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as asked</Message></Error>'.encode()
        start_response(f'{fault[1]} Failed', [('Content-Type', 'application/xml'), ('Content-Length', str(len(body)))])
        return [body]


@contextmanager
def serve() -> Iterator[Store]:
    """Run the server in a thread; boto3 finds credentials in the environment."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    store = Store(None)
    app = FaultyApp(DomainDispatcherApplication(create_backend_app), store.faults, store.requests)
    server = make_server('127.0.0.1', 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f'http://127.0.0.1:{server.server_port}'
    store.client = boto3.client('s3', endpoint_url=url, region_name='us-east-1', **CREDENTIALS)
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
