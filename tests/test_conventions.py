"""Conventions of the whole package that no linter knows, each with its exceptions by name."""

import ast
import functools
from typing import Any

from test_layers import MODULES

CHANGED_IN_PLACE = """
    Attempt BenchStage Entry GenerateConfig GenerateOptions HybridFSDP2Config InitFrom InputRow JobSpec NamedCount
    NodeStatus PartCounts PrepareReport Recipe Removal RunContent RunCost RunReport SampleCounts SampledImages Series
    ShardResult ShardTask TimeBreakdown TrainingRun VerifyReport _ImageFile _Recording _Span
"""
"""Data classes that are filled in after they are built; `HybridFSDP2Config` extends a class of Composer."""

WITHOUT_PARENTS = {
    'checkpointing.bucket_storage', 'checkpointing.tiers.node_tier', 'checkpointing.tiers.tier_restore',
    'launch.failure_stacks', 'prepare.pipeline', 'storage.places',
}  # fmt: skip
"""Modules that create folders in one that must be there."""

EITHER_WAY = """
    HostProblem.fatal Piece.is_whole _clip.first _compile_forward.with_gradients _entries.named _write.create
    check_kind.is_append check_plans.record compile.dynamic fetch.weights partial.to_loggers
    replace.reshard_after_forward run.check tokenizer.truncation zero_grad.set_to_none zip.strict
"""
"""Switches, as function and keyword, that some calls turn on and others off."""


@functools.cache
def nodes() -> list[tuple[str, ast.Call | ast.ClassDef]]:
    found = []
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding='utf-8'))
        found += [(module, node) for node in ast.walk(tree) if isinstance(node, ast.Call | ast.ClassDef)]
    return found


def calls(*names: str) -> list[tuple[str, dict[str | None, Any]]]:
    """Return the module and the constant keywords of each call of the functions and methods with these names."""
    found = [
        (module, {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)})
        for module, node in nodes()
        if isinstance(node, ast.Call) and getattr(node.func, 'id', getattr(node.func, 'attr', '')) in names
    ]
    assert found
    return found


def test_data_classes_are_frozen_but_for_those_that_are_changed_in_place():
    changed = set()
    for _, node in nodes():
        if isinstance(node, ast.ClassDef):
            decorators = [ast.unparse(each) for each in node.decorator_list if 'dataclass' in ast.unparse(each)]
            changed |= {node.name for each in decorators if 'frozen=True' not in each}
    assert changed == set(CHANGED_IN_PLACE.split())


def test_all_calls_of_a_function_set_a_switch_the_same_way():
    """Such as `missing_ok=True`, since another process may remove the file, or `sort_keys=True` in hashed JSON."""
    found: dict[str, set[bool]] = {}
    for _, node in nodes():
        function = getattr(node, 'func', node)
        for each in node.keywords:
            if isinstance(each.value, ast.Constant) and isinstance(each.value.value, bool):
                name = f'{getattr(function, "id", getattr(function, "attr", ""))}.{each.arg}'
                found.setdefault(name, set()).add(each.value.value)
    assert {name for name, values in found.items() if len(values) > 1} == {*EITHER_WAY.split()}


def test_sequences_of_different_lengths_are_named():
    """`zip` would drop the rest of the longer one without a word."""
    assert {module for module, keywords in calls('zip') if keywords.get('strict') is not True} == {
        'config.schema', 'launch.backends.kubernetes', 'models.token_routing', 'prepare.caption_files',
        'prepare.report_content',
    }  # fmt: skip


def test_threads_and_processes_do_not_outlive_the_main_thread():
    lasting = [module for module, keywords in calls('Thread', 'Process') if keywords.get('daemon') is not True]
    assert lasting == ['launch.standby.process']


def test_folders_may_exist_and_are_created_with_their_parents():
    """Another process may create the same folder; `mkdir()` alone claims a name that nobody else has."""
    for module, keywords in calls('mkdir', 'makedirs'):
        if keywords.keys() - {'mode', 'parents'}:
            assert keywords['exist_ok'], module
            assert keywords.get('parents') or module in WITHOUT_PARENTS, module


def test_weights_are_loaded_without_running_code_from_their_pickles():
    loads = [node for _, node in nodes() if isinstance(node, ast.Call) and ast.unparse(node.func) == 'torch.load']
    assert loads and all('weights_only=True' in ast.unparse(node) for node in loads)
