"""Secrets in plain text are recognized by format and by name; hashes, revisions, prompts and paths are none."""

import hashlib
import string
from pathlib import Path

import pytest
import yaml
from golden import check_golden, check_transcripts
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.interpolation import Interpolation
from diffusion.config.load import RecipeError, load
from diffusion.config.secrets import secret_format, secret_problems

# Composed from parts, so that scanners of repositories do not report them.
HEX = '0123456789abcdef' * 3
WORD = 'aZ3' * 30
SECRETS = {
    'AWS access key': 'AKIA' + 'ABCD1234' * 2,
    'temporary AWS access key': 'ASIA' + 'ABCD1234' * 2,
    'AWS secret key': 'wJalrXUtnFEMI/K7MDENG/bPxRfiCY' + 'EXAMPLEKEY',
    'AWS secret key of 6 capitals': 'ABCDEF' + '///' + 'abcdef' + '01234' * 5,
    'AWS session token': 'IQoJb3JpZ2lu' + WORD,
    'older AWS session token': 'FwoGZXIvYXdz' + WORD,
    'Hugging Face token': 'hf_' + WORD[:34],
    'W&B key': HEX[:40],
    'newer W&B key': 'wandb_v1_' + WORD[:40],
    'key of a W&B server': 'local-' + HEX[:40],
    'GitHub token': 'ghp_' + WORD[:36],
    'fine-grained GitHub token': 'github_pat_' + WORD[:60],
    'GitLab token': 'glpat-' + WORD[:20],
    'OpenAI key': 'sk-proj-' + WORD[:48],
    'Anthropic key': 'sk-ant-api03-' + WORD[:60],
    'Slack token': 'xoxb-' + '1234567890-' * 2 + WORD[:20],
    'Slack webhook': 'https://hooks.slack.com/services/' + 'T0123/B0123/' + WORD[:24],
    'Discord webhook': 'https://discord.com/api/webhooks/' + '12345/' + WORD[:30],
    'Azure connection string': 'DefaultEndpointsProtocol=https;AccountName=a;AccountKey=' + 'aB3+' * 21 + 'aB==',
    'Azure storage key': 'aB3+' * 21 + 'aB==',
    'Azure SAS': 'https://a.blob.core.windows.net/c?sv=2022-11-02&sig=' + 'aB3%2F' * 8,
    'signed S3 URL': 'https://b.s3.amazonaws.com/k?X-Amz-Signature=' + HEX,
    'Google API key': 'AIza' + WORD[:35],
    'GCS HMAC key': 'GOOG1' + 'ABCD1234' * 4,
    'service account': '{"type": "service_account", "private_key": "x"}',
    'private key': '-----BEGIN RSA ' + 'PRIVATE KEY-----\nabc',
    'JSON web token': 'eyJ' + WORD[:20] + '.eyJ' + WORD[:20] + '.' + WORD[:20],
    'Databricks token': 'dapi' + HEX[:32],
    'URL with a password': 'https://user:hunter2@example.com/path',
    'URL with a password in a text': 'proxy is http://u:p4ss@proxy:3128, use it',
    'URL with a token as password': 'redis://:hunter2@cache:6379/0',
}
HARMLESS = {
    'a prompt': 'a photo of a cat, 4k, trending: 50mm f/1.8 @ golden hour, style:oil',
    'a long prompt': 'the quick brown fox ' * 40,
    'SHA-256': hashlib.sha256(b'x').hexdigest(),
    'SHA-1 in a path': f'models--a--b/snapshots/{HEX[:40]}/vae',
    'MD5': HEX[:32],
    'xxh64': 'xxh64:' + HEX[:16],
    'image by digest': f'registry.example.com/diffusion@sha256:{hashlib.sha256(b"y").hexdigest()}',
    'image with port': 'registry.example.com:5000/team/diffusion:2026-11-22',
    'S3 folder': 's3://bucket/laion-2b-en/aesthetic-6plus/256x256/mds',
    'path': '/fsx/Datasets/LAION2BEN/Aesthetic45/Shards256px/',
    '40 characters with 5 capitals': 'ABCDE' + 'abcdefgh' * 4 + '012',
    '40 characters with 5 small letters': 'ABCDEFGH' * 4 + 'abcde' + '012',
    '40 characters with 4 slashes': 'ABCDEF////abcdef' + '0123' * 6,
    '40 letters': 'ABCDEFabcdef' * 3 + 'ABCD',
    'path of 40 letters': '/data/ImagesXLAION/Shards/Resolution256a',
    'URL with port': 'http://127.0.0.1:9000/bucket',
    'mail address': 'mailto:someone@example.com',
    'URL with a variable': Interpolation('https://user:${oc.env:PASSWORD}@host/x'),
    'a variable': Interpolation('${oc.env:HF_TOKEN}'),
    'a default': Interpolation('${oc.env:RUN,quick}'),
    'risk': 'risk-averse-and-task-oriented-long-run-name-of-a-run',
    'repository': 'stabilityai/stable-diffusion-2-base',
    'role': 'arn:aws:iam::123456789012:role/SageMakerExecutionRole',
    'duration': '550000ba',
    'UUID': '123e4567-e89b-12d3-a456-426614174000',
    'caption with a URL': 'see https://example.com/a?sig=short for more',
    'variable of a container in Kubernetes': {'name': 'A', 'value': 'b'},
}


def test_secret_is_recognized_and_not_quoted():
    found = []
    for kind, secret in SECRETS.items():
        (problem,) = secret_problems({'loggers': {'x': {'entity': secret}}})
        assert problem.where == 'loggers.x.entity' and secret not in str(problem)
        assert secret_problems({'generate': {'prompts': ['a cat', secret]}})[0].where == 'generate.prompts[1]'
        found.append(f'{kind}: {problem.what.partition(", and would")[0]}\n')
    check_golden(Path(__file__).parent / 'golden' / 'secrets', {'messages.txt': ''.join(found)})


@pytest.mark.parametrize('kind', HARMLESS)
def test_harmless_text_is_accepted(kind):
    assert secret_problems({'generate': {'prompts': [HARMLESS[kind]]}, 'model': {'vae': HARMLESS[kind]}}) == []


def test_git_revision_is_no_secret():
    keys = ('revision', 'vae_revision', 'commit', 'sha', 'checksum', 'data_hash', 'git_ref')
    assert secret_problems(dict.fromkeys(keys, HEX[:40])) == [] != secret_problems({'key': HEX[:40]})


def test_secret_by_the_name_of_its_key():
    """The lines of the file are keys and values."""

    def outcome(line):
        key, value = line.split(': ')
        value = Interpolation(value) if value[0] == '$' else yaml.safe_load(value)
        return secret_problems({key: value}) or ['harmless']

    check_transcripts(Path(__file__).parent / 'golden' / 'secret_names', outcome)


def test_recipe_and_override_with_a_secret_are_refused_without_quoting_it(tmp_path):
    token = SECRETS['Hugging Face token']
    path = tmp_path / 'r.yaml'
    path.write_text(f'extends: {tmp_path.cwd()}/yamls/quickstart.yaml\nloggers: {{wandb: {{entity: {token}}}}}\n')
    for recipe, overrides in ((path, []), ('yamls/quickstart.yaml', [f'loggers.wandb.entity={token}'])):
        with pytest.raises(RecipeError, match='loggers.wandb.entity: contains what looks like a secret') as raised:
            load(recipe, overrides)
        assert token not in str(raised.value)


@given(text=st.text(string.ascii_lowercase + ' ,.-/', max_size=200))
@settings(max_examples=80, deadline=None)
def test_lower_case_text_is_never_a_secret(text):
    assert secret_format(text) is None
