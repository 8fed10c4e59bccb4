"""Checks of the settings for saving and keeping checkpoints, and of a `runs_dir` in an object store.

The checks send no requests to a store.
"""

import os
import re

from diffusion.config.checkpointing import KeepConfig, TierConfig, TiersConfig
from diffusion.config.recipe import Recipe
from diffusion.config.schema import MISSING, Problem

COMPOSER_SAVER_KEYWORDS = {
    *('save_filename', 'save_ignore_keys', 'save_latest_filename', 'save_overwrite', 'save_weights_only')
}
"""Arguments of composer.Trainer that affect only the files of Composer's own CheckpointSaver."""
LAST = 'save_num_checkpoints_to_keep'
"""Argument of composer.Trainer that means the same as `checkpointing.keep.last`."""
NOT_COMPOSER = "does not apply to Composer's own checkpoints, which trainer.save_folder selects"


def check_checkpointing(recipe: Recipe) -> list[Problem]:
    """Return the mistakes in the `checkpointing` section and in the Trainer's arguments for checkpoints."""
    if not isinstance(recipe.trainer, dict):
        return []
    keep, tiers, by_composer = recipe.checkpointing.keep, recipe.checkpointing.tiers, 'save_folder' in recipe.trainer
    problems = _keep_problems(keep) if isinstance(keep, KeepConfig) else []
    problems += _tier_problems(tiers, by_composer) if isinstance(tiers, TiersConfig) else []
    if by_composer:
        if keep is not None:
            problems.append(Problem('checkpointing.keep', f'{NOT_COMPOSER}; use trainer.{LAST}'))
        return problems
    last = recipe.trainer.get(LAST)
    if keep is not None and isinstance(last, int) and last > 0:
        what = f'is {last}, and checkpointing.keep is set too, whose key `last` means the same; remove it, or use -1'
        problems.append(Problem(f'trainer.{LAST}', what))
    elif isinstance(last, int) and last < 1 and last != -1:
        problems.append(Problem(f'trainer.{LAST}', f'{last} would keep no checkpoint; use 1 or more, or -1 for all'))
    return problems + [
        Problem(
            f'trainer.{key}',
            f"applies only to Composer's own checkpoints; this run saves to {recipe.runs_dir}/{recipe.name}/baN: "
            "remove it, or also set trainer.save_folder for Composer's checkpoints, which are not verified",
        )
        for key in sorted(COMPOSER_SAVER_KEYWORDS & recipe.trainer.keys())
    ]


def _tier_problems(tiers: TiersConfig, by_composer: bool) -> list[Problem]:
    problems = []
    for name, tier in (('memory', tiers.memory), ('disk', tiers.disk)):
        where = f'checkpointing.tiers.{name}'
        if not isinstance(tier, TierConfig):
            continue
        if by_composer:
            problems.append(Problem(where, f'{NOT_COMPOSER}; remove one of the two'))
        if isinstance(tier.save_interval, str) and re.fullmatch(r'\d+(\.\d+)?(ep|iter|dur)', tier.save_interval):
            what = f'{tier.save_interval} is not an interval for a tier; use a time (10m) or batches (50ba)'
            problems.append(Problem(f'{where}.save_interval', what))
        if name == 'disk' and tier.folder is None:
            what = 'is missing; name a folder on a local disk, such as /local/nvme'
            problems.append(Problem(f'{where}.folder', what))
    return problems


def _keep_problems(keep: KeepConfig) -> list[Problem]:
    problems = []
    if isinstance(keep.last, int) and keep.last < 1:
        problems.append(Problem('checkpointing.keep.last', f'{keep.last} is less than 1; the newest one always stays'))
    for key, count in (('hourly', keep.hourly), ('daily', keep.daily)):
        if isinstance(count, int) and count < 0:
            problems.append(Problem(f'checkpointing.keep.{key}', f'{count} is negative; use 0 to turn the rule off'))
    every = keep.every
    if isinstance(every, str) and every != MISSING and not re.fullmatch(r'0*[1-9]\d*ba', every):
        problems.append(Problem('checkpointing.keep.every', f'{every!r} is not a number of batches; write 10000ba'))
    return problems


CONDITIONAL_SCHEMES = ('s3', 'gs', 'az', 'azure', 'azure-dl')
"""URL schemes of object stores that support conditional writes, which the lock of a run needs."""


def runs_dir_problem(runs_dir: str) -> str | None:
    """Return an error message if `runs_dir` is a malformed URL or in a store that cannot hold runs, else None."""
    scheme, separator, rest = runs_dir.partition('://')
    if not separator:
        scheme, separator, rest = runs_dir.partition(':/')
        if separator and scheme in CONDITIONAL_SCHEMES:
            return f'{runs_dir} has one slash after the colon, so it is a folder; for a store, write {scheme}://{rest}'
        return None
    if scheme not in CONDITIONAL_SCHEMES:
        return (
            f'{scheme}:// cannot hold runs; use s3://bucket/runs, gs://, az:// or azure://, which have the conditional '
            'writes that the lock of a run needs, or a folder that all nodes share'
        )
    bucket, _, key = rest.partition('/')
    if scheme == 'azure' and (not bucket or not key.strip('/')):
        return (
            f'{runs_dir} has no container; use a URL such as azure://ACCOUNT.blob.core.windows.net/CONTAINER/runs, or '
            'az://CONTAINER/runs with AZURE_ACCOUNT_NAME'
        )
    if not bucket:
        return f'{runs_dir} has no bucket; use a URL such as {scheme}://bucket/runs'
    return None


def credentials_problem(runs_dir: str) -> str | None:
    """Return an error message if gs:// would use unsuitable credentials or az:// has no account, else None."""
    if runs_dir.startswith('gs://') and {'GCS_KEY', 'GCS_SECRET'} <= os.environ.keys():
        return (
            'conditional writes to gs:// need Application Default Credentials; unset GCS_KEY and GCS_SECRET, and run '
            '`gcloud auth application-default login` or attach a service account to the machine'
        )
    has_account = {'AZURE_ACCOUNT_NAME', 'AZURE_STORAGE_ACCOUNT_NAME'} & os.environ.keys()
    if runs_dir.startswith(('az://', 'azure-dl://')) and not has_account:
        return (
            f'the account of {runs_dir} is missing; set AZURE_ACCOUNT_NAME, or use a URL such as '
            'azure://ACCOUNT.blob.core.windows.net/CONTAINER/runs'
        )
    return None
