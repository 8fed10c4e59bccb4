"""Tests, as a regular package: without this file, a package of that name in site-packages would hide them."""
