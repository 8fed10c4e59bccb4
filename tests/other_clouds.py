"""Fakes of Google Cloud Storage, Azure Blob Storage and the Hugging Face Hub on localhost, for their real clients."""

import base64
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

PAGE = 2
"""Number of objects per page of a listing."""
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body of a response."""


@dataclass
class Cloud:
    """Object store behind the three APIs."""

    url: str = ''
    """URL of the server."""
    objects: dict[tuple[str, str], tuple[bytes, int]] = field(default_factory=dict)
    """Content of each object, and the number of the write that created it, by bucket and key."""
    writes: int = 0
    """Number of writes."""
    status: int | None = None
    """HTTP status of all responses; None answers normally."""
    lost_answers: int = 0
    """Number of further PUT, POST and DELETE requests that are carried out and then answered with status 500."""
    requests: int = 0
    """Number of requests."""

    def put(self, bucket: str, key: str, body: bytes) -> int:
        """Write an object, and return the number of the write."""
        self.writes += 1
        self.objects[bucket, key] = body, self.writes
        return self.writes

    def page(self, bucket: str, query: dict[str, str], start: str) -> tuple[list[str], list[str], str]:
        """Return the keys and the common prefixes of a page of a listing, and the start of the next page or ''."""
        prefix, delimiter, entries = query.get('prefix', ''), query.get('delimiter'), set()
        for name, key in self.objects:
            if name == bucket and key.startswith(prefix):
                folder, slash, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ('', '', '')
                entries.add((prefix + folder + slash, True) if slash else (key, False))
        found = sorted(entry for entry in entries if entry[0] >= start)
        keys = [name for name, is_folder in found[:PAGE] if not is_folder]
        return keys, [name for name, is_folder in found[:PAGE] if is_folder], (found[PAGE][0] if found[PAGE:] else '')

    def google(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        match = re.fullmatch(r'(/upload|/download|)/storage/v1/b/([^/]+)/o(?:/(.+))?', path)
        assert match is not None, path
        kind, bucket, key = match[1], match[2], unquote(match[3] or '')
        if bucket == 'missing':
            message = 'The specified bucket does not exist.'
            return 404, {'Content-Type': 'application/json'}, json.dumps({'error': {'message': message}}).encode()
        if kind == '/upload':
            content = headers['content-type']
            boundary = re.search('boundary="?([^";]+)', content)[1].encode()  # type: ignore[index]
            _, metadata, data, _ = body.split(b'--' + boundary)
            key = json.loads(metadata.partition(b'\r\n\r\n')[2])['name']
            found = self.objects.get((bucket, key), (b'', 0))[1]
            if query.get('ifGenerationMatch', str(found)) != str(found):
                return 412, {}, b'{}'
            self.put(bucket, key, data.partition(b'\r\n\r\n')[2].removesuffix(b'\r\n'))
        elif not key:
            keys, folders, following = self.page(bucket, query, query.get('pageToken', ''))
            found = {'items': [self.metadata(bucket, name) for name in keys], 'prefixes': folders}
            return 200, {}, json.dumps(found | ({'nextPageToken': following} if following else {})).encode()
        if (bucket, key) not in self.objects:
            return 404, {}, b'{}'
        if method == 'DELETE':
            del self.objects[bucket, key]
            return 204, {}, b''
        if query.get('alt') == 'media':
            if query.get('ifGenerationMatch', str(self.objects[bucket, key][1])) != str(self.objects[bucket, key][1]):
                return 412, {}, b'{}'
            return part_of(self.objects[bucket, key][0], headers.get('range'))
        return 200, {}, json.dumps(self.metadata(bucket, key)).encode()

    def metadata(self, bucket: str, key: str) -> dict[str, str]:
        """Return an object's metadata in Google's format."""
        body, generation = self.objects[bucket, key]
        return {'name': key, 'size': str(len(body)), 'etag': f'G{generation}=', 'generation': str(generation)}

    def azure(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        container, _, key = unquote(path).removeprefix('/').partition('/')
        if container == 'missing':
            return 404, {'x-ms-error-code': 'ContainerNotFound'}, b''
        if query.get('comp') == 'list':
            keys, folders, following = self.page(container, query, query.get('marker', ''))
            prefixes = ''.join(f'<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>' for name in folders)
            blobs = ''.join(
                f'<Blob><Name>{escape(name)}</Name><Properties><BlobType>BlockBlob</BlobType>'
                f'<Etag>0x{number}</Etag><Content-Length>{len(content)}</Content-Length></Properties></Blob>'
                for name in keys
                for content, number in [self.objects[container, name]]
            )
            xml = f'<Blobs>{blobs}{prefixes}</Blobs><NextMarker>{following}</NextMarker>'
            prefix = f'<Prefix>{escape(query.get("prefix", ""))}</Prefix>'  # the client sends it with the next page
            xml = f'<EnumerationResults>{prefix}{xml}</EnumerationResults>'
            return 200, {'Content-Type': 'application/xml'}, xml.encode()
        found = self.objects.get((container, key))
        if method == 'PUT':
            if found is not None and headers.get('if-none-match') == '*':
                return 409, {'x-ms-error-code': 'BlobAlreadyExists'}, b''
            if 'if-match' in headers and (found is None or headers['if-match'] != f'"0x{found[1]}"'):
                return 412, {'x-ms-error-code': 'ConditionNotMet'}, b''
            return 201, {'ETag': f'"0x{self.put(container, key, body)}"'}, b''
        if found is None:
            return 404, {'x-ms-error-code': 'BlobNotFound'}, b''
        if method == 'DELETE':
            del self.objects[container, key]
            return 202, {}, b''
        if headers.get('if-match', f'"0x{found[1]}"') != f'"0x{found[1]}"':
            return 412, {'x-ms-error-code': 'ConditionNotMet'}, b''
        status, extra, part = part_of(found[0], headers.get('x-ms-range') or headers.get('range'))
        return status, {'ETag': f'"0x{found[1]}"', 'x-ms-blob-type': 'BlockBlob', **extra}, part

    def hub(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        """Answer a request to the Hugging Face Hub about the dataset org/name; its files are in bucket `datasets`."""
        files = {key.removeprefix('org/name/'): content for (_, key), (content, _) in self.objects.items()}
        rest = unquote(path).partition('/datasets/org/name')[2].strip('/')
        if rest.startswith('resolve/main/'):
            return (*part_of(files[rest.removeprefix('resolve/main/')], headers.get('range')),)
        if rest.startswith(('tree/main', 'paths-info/main')):
            wanted = parse_qs(body.decode()).get('paths', [''])
            below = rest.removeprefix('tree/main').strip('/') if rest.startswith('tree') else wanted[0]
            found = [
                {'type': 'file', 'path': key, 'size': len(content), 'oid': f'oid{len(content)}'}
                for key, content in files.items()
                if key == below or not below or (rest.startswith('tree') and key.startswith(below + '/'))
            ]
            if rest.startswith('tree') and query.get('recursive', '').lower() != 'true':
                inner = {each['path'].removeprefix(below).strip('/').partition('/') for each in found}
                folders = {f'{below}/{name}'.strip('/') for name, slash, _ in inner if slash}
                found = [each for each in found if each['path'].removeprefix(below).strip('/').count('/') == 0]
                found += [{'type': 'directory', 'path': name, 'oid': 'tree'} for name in sorted(folders)]
            if not found and below and any(key.startswith(below + '/') for key in files):
                found = [{'type': 'directory', 'path': below, 'oid': 'tree'}]
            if rest.startswith('tree') and not found:
                return 404, {'X-Error-Code': 'EntryNotFound'}, b'{}'
            return 200, {}, json.dumps(found).encode()
        return 200, {}, json.dumps({'id': 'org/name', 'sha': 'f' * 40}).encode()

    def application(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """Answer a WSGI request with the API that its path belongs to."""
        headers = {name[5:].replace('_', '-').lower(): value for name, value in environ.items() if name[:5] == 'HTTP_'}
        headers['content-type'] = environ.get('CONTENT_TYPE', '')
        query = {name: values[0] for name, values in parse_qs(environ['QUERY_STRING']).items()}
        body = environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
        path, method = environ['REQUEST_URI'].partition('?')[0], environ['REQUEST_METHOD']
        answer = self.google if '/storage/v1/' in path else self.hub if '/datasets/org/' in path else self.azure
        self.requests += 1
        if self.status is not None:
            start_response(f'{self.status} Failed', [('Content-Length', '2')])
            return [b'{}']
        status, extra, content = answer(method, path, query, headers, body)
        if method in ('PUT', 'POST', 'DELETE') and self.lost_answers:
            self.lost_answers -= 1
            status, extra, content = 500, {}, b'{}'
        start_response(f'{status} Answer', [*({'Content-Length': str(len(content))} | extra).items()])
        return [] if method == 'HEAD' else [content]


def part_of(body: bytes, span: str | None) -> Answer:
    """Return the response with a whole body, or with the bytes of a Range header."""
    from google_crc32c import value

    checksum = base64.b64encode(struct.pack('>I', value(body))).decode()
    headers = {'Content-Type': 'application/octet-stream', 'X-Goog-Hash': f'crc32c={checksum}'}
    if span is None or not body:
        return (416 if span else 200), headers, body
    first, last = span.removeprefix('bytes=').split('-')
    end = min(int(last or len(body)), len(body) - 1)
    return 206, {'Content-Range': f'bytes {first}-{end}/{len(body)}'}, body[int(first) : end + 1]


@contextmanager
def serve() -> Iterator[Cloud]:
    """Run the server in a thread, and yield its object store."""
    import logging

    from werkzeug.serving import make_server

    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    cloud = Cloud()
    server = make_server('127.0.0.1', 0, cloud.application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    cloud.url = f'http://127.0.0.1:{server.server_port}'
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
