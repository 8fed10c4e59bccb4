"""Small files and calls that processes of a run share: claims on evaluations, run.json, calls with a time limit."""

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from diffusion.errors import UserError
from diffusion.runs.bounded_call import call_with_limit, storage_problem, within_limit
from diffusion.runs.environment import machine_name, number, worker_notice_seconds
from diffusion.runs.evaluation_claims import EvaluationClaims
from diffusion.runs.run_id import check_run_id, claim_working_folder, create_run_id, read_run_id


@pytest.fixture
def now(monkeypatch) -> list[float]:
    found = [1e9]
    monkeypatch.setattr('time.time', lambda: found[0])
    return found


def test_claim_ends_when_it_is_released_or_was_not_renewed_within_its_lease(tmp_path, now):
    claims = EvaluationClaims(str(tmp_path), lease_seconds=50.0, job=True)
    assert (claims.tries(), claims.held()) == ({}, set())
    claim = claims.take('ba10', 0)
    assert claim is not None and claim.place == f'{tmp_path}/evaluations/ba10.claim-1'
    content = json.loads(Path(claim.place).read_text())
    assert content == {'owner': asdict(claim.owner), 'renewed': 1e9, 'lease_seconds': 50.0, 'job': True}
    assert claims.take('ba10', 0) is claims.take('ba10', 1) is None, 'it is being evaluated'
    inode = Path(claim.place).stat().st_ino
    for seconds, ends in ((40.0, 90.0), (80.0, 130.0)):
        now[0] = 1e9 + seconds
        claim.renew()
        now[0] = 1e9 + ends
        assert claims.held() == {'ba10'}
    now[0] += 0.5
    assert claims.held() == set() and claims.has_ended('ba10', 1)
    assert Path(claim.place).stat().st_ino == inode, 'clients of a network file system see a changed file sooner'
    claim.renew()
    assert claims.held() == {'ba10'}
    claim.release()
    second = claims.take('ba10', 1)
    assert second is not None and second.name == 'evaluations/ba10.claim-2'
    assert claims.take('ba7', 0) is not None and (tmp_path / 'evaluations/ba7.json').write_text('{}')
    assert (claims.tries(), claims.held()) == ({'ba10': 2, 'ba7': 1}, {'ba10', 'ba7'})
    names = ('ba3.claim-2', 'ba3.claim-1', 'ba3.claim-1.json')
    claims._files = Mock(**{'list.return_value.files': dict.fromkeys(names)})
    assert claims.tries() == {'ba3': 2}, 'in any order'


@pytest.mark.parametrize('job', [True, False])
def test_claim_of_a_dead_process_has_ended_unless_a_job_elsewhere_evaluates(tmp_path, job):
    claims = EvaluationClaims(str(tmp_path), lease_seconds=50.0, job=job)
    claim = claims.take('ba10', 0)
    assert claim is not None and not claims.has_ended('ba10', 1)
    dead = replace(claim, owner=replace(claim.owner, started='1'))
    dead.renew()
    assert claims.has_ended('ba10', 1) == (not job)


@pytest.mark.parametrize('content', ['', '{"renewed": 1', '[]', '{"renewed": "soon", "lease_seconds": 5}'])
def test_claim_that_is_half_written_has_the_age_of_its_file(tmp_path, now, content):
    claims, path = EvaluationClaims(str(tmp_path), lease_seconds=50.0), tmp_path / 'evaluations/ba10.claim-1'
    path.parent.mkdir()
    assert not claims.has_ended('ba10', 1), 'a file that is being replaced'
    path.write_text(content)
    for age, has_ended in ((50.0, False), (50.5, True)):
        os.utime(path, (now[0] - age,) * 2)
        assert claims.has_ended('ba10', 1) == has_ended


def test_folder_of_another_run_or_without_its_run_file_is_an_error_that_names_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv('DIFFUSION_MACHINE', 'node7')
    run_id = create_run_id(tmp_path)
    assert read_run_id(tmp_path) == run_id and create_run_id(tmp_path, 'mine') == 'mine'
    check_run_id(tmp_path, 'mine')
    content = json.loads((tmp_path / 'run.json').read_text())
    for changes, message in (
        ({}, 'run.json has id mine, expected other: another folder is at this path on node7'),
        ({'version': 2}, 'run.json is damaged .*run.json: version 2, expected 1; use the version of diffusion that'),
        ({'id': ''}, 'run.json is damaged .*not the identity of a run .*id is .*restore the file'),
        ({'id': 5}, 'run.json is damaged'),
    ):
        (tmp_path / 'run.json').write_text(json.dumps(content | changes))
        with pytest.raises(OSError, match=message):
            check_run_id(tmp_path, 'other')
    (tmp_path / 'run.json').write_text('{"id": ')
    with pytest.raises(
        OSError, match=r'damaged \(.*not the identity of a run \(JSONDecodeError.*; restore the file, or'
    ):
        check_run_id(tmp_path, 'other')
    (tmp_path / 'run.json').unlink()
    with pytest.raises(OSError, match='run.json is missing: the folder was moved, or .* no longer mounted on node7'):
        check_run_id(tmp_path, 'other')


def test_working_folder_is_emptied_for_another_run_only(tmp_path, caplog):
    folder = tmp_path / 'a/run'
    for run_id, kept in (('one', False), ('one', True), ('two', False)):
        claim_working_folder(folder, run_id)
        assert (folder / 'file').exists() == kept and read_run_id(folder) == run_id
        (folder / 'file').touch()
    assert [each.getMessage() for each in caplog.records] == [
        f'{folder}: removed, since it belongs to an earlier run at the same URL'
    ]
    (folder / 'run.json').write_text('')
    claim_working_folder(folder, 'three')
    assert read_run_id(folder) == 'three' and len(caplog.records) == 1


def test_call_ends_at_its_limit_and_raises_the_errors_of_the_function():
    ended = threading.Event()
    assert call_with_limit(ended.wait, 0.01, 'late') == 'late'
    ended.set()
    assert call_with_limit(lambda: 5, 10.0, 0) == 5
    with pytest.raises(ValueError, match='bug'):
        call_with_limit(lambda: int('bug'), 10.0, 0)

    def fail(*arguments: object) -> None:
        raise OSError(*arguments)

    problems = [storage_problem(lambda given=given: fail(*given)) for given in ((), ('full',), (5, 'broken'))]
    assert problems == ['OSError', 'full', '[Errno 5] broken'] and storage_problem(lambda: 5) == ''
    assert storage_problem(threading.Event().wait, 0.01) == 'its storage does not respond'
    assert within_limit(lambda: False) and not within_limit(fail)


def test_variables_of_a_node_name_its_machine_and_its_notice():
    named = {'SLURMD_NODENAME': 'slurm', 'DIFFUSION_MACHINE': 'pod'}
    assert [machine_name(each) for each in (named, {'SLURMD_NODENAME': 'slurm'})] == ['pod', 'slurm']
    notices = [worker_notice_seconds({'DIFFUSION_NOTICE_SECONDS': each}) for each in ('30', '6.5', '6', '0')]
    assert notices == [25.0, 1.5, 1.0, 1.0] and worker_notice_seconds({}) is None
    with pytest.raises(UserError, match="^A: 'x' is not a number; set it to a number or unset it"):
        number({'A': 'x'}, 'A', 2.0)
