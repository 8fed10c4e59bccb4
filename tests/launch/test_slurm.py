"""Handling of job ends by the sbatch script, tested with fake Slurm programs that record their calls."""

import os
import subprocess
from pathlib import Path

import pytest
from commands import output_of, refusal

from diffusion.cli import main
from diffusion.exit_codes import FAILED
from diffusion.launch.backends import free_nodes
from diffusion.launch.job_checks import load_job_spec

SRUN = """#!/bin/bash
# Each node reports its exit status, and srun exits with the highest one.
printf '%s' "$EXITS" > "$DIFFUSION_EXIT_FILE"
echo "srun attempt=$DIFFUSION_ATTEMPT" >> "$CALLS"
exit "$SRUN_STATUS"
"""
RECORD_CALL = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
"""
SCONTROL = f"""#!/bin/bash
if [ "$2" = hostnames ]; then
    printf '%s\\n' n1 n2
    exit
fi
{RECORD_CALL}
if [ "$(grep -c scontrol "$CALLS")" -le "${{AWAY:-0}}" ]; then
    exit 1
elif [ "$2" = show ]; then
    echo "JobId=7 JobState=${{STATE:-RUNNING}} Restarts=$RESTARTS ExcNodeList=${{EXCLUDED:-(null)}} Power="
fi
"""
SBATCH = RECORD_CALL + 'echo "$((100 + $(grep -c sbatch "$CALLS")));cluster"\n'
REQUEUE = 'scontrol requeue 7'


@pytest.fixture
def slurm(add_program, tmp_path, monkeypatch):
    """Fake Slurm programs on PATH; return the file in which they record their calls."""
    recorders = dict.fromkeys(('squeue', 'sleep', 'scancel'), RECORD_CALL)
    for name, text in {'srun': SRUN, 'scontrol': SCONTROL, 'sbatch': SBATCH, **recorders}.items():
        add_program(name, text)
    monkeypatch.setenv('CALLS', str(tmp_path / 'calls'))
    (tmp_path / 'calls').touch()
    return tmp_path / 'calls'


def run_script(script: str, calls: Path, *, status: int, exits: str = '', restarts: int | None = None, **environ: str):
    """Return the exit status of the script and its calls after srun, except queries."""
    (calls.parent / 'logs').mkdir(exist_ok=True)
    calls.write_text('')
    environment = {'SLURM_JOB_ID': '7', 'SRUN_STATUS': str(status), 'EXITS': exits, 'RESTARTS': str(restarts or 0)}
    environment = os.environ | environment | environ
    if restarts is not None:
        environment['SLURM_RESTART_COUNT'] = str(restarts)
    result = subprocess.run(['bash'], input=script, cwd=calls.parent, env=environment, text=True, check=False)
    calls_made = calls.read_text().splitlines()
    assert calls_made[0] == f'srun attempt={restarts or 0}'
    return result.returncode, [call for call in calls_made[1:] if ' show ' not in call]


@pytest.fixture
def script(prepare):
    return lambda **changes: prepare('slurm', **changes)[1].files['job.sbatch']


@pytest.mark.parametrize(
    ('status', 'variables', 'expected', 'requeued'),
    [
        (1, {}, 1, True),
        (75, {}, 75, True),
        (137, {}, 137, True),
        (0, {'exits': '0 n1\n0 n2\n'}, 0, False),
        (78, {}, 78, False),
        (143, {'STATE': 'CANCELLED'}, 143, False),
        # A later attempt of the job runs or is queued.
        (1, {'RESTARTS': '1'}, 1, False),
        pytest.param(1, {'RESTARTS': '1', 'STATE': 'PENDING'}, 1, False, marks=pytest.mark.slow),
        pytest.param(1, {'RESTARTS': '11', 'restarts': 1}, 1, False, marks=pytest.mark.slow),
        # The first failed node decides, and not those that srun has killed.
        (143, {'exits': '78 n2\n143 n1\n'}, 78, False),
        (143, {'exits': '0 n1\n75 n2\n143 n3\n'}, 75, True),
    ],
)
def test_crashed_and_preempted_attempts_alone_are_requeued(status, variables, expected, requeued, script, slurm):
    assert run_script(script(), slurm, status=status, **variables) == (expected, [REQUEUE] * requeued)


def test_bad_hardware_is_requeued_without_faulty_nodes(script, slurm):
    exits = '76 n3\n143 n1\n76 n5\n'
    expected = [REQUEUE, 'scontrol update JobId=7 ExcNodeList=n3,n5']
    assert run_script(script(), slurm, status=143, exits=exits) == (76, expected)
    calls_made = run_script(script(), slurm, status=143, exits=exits, EXCLUDED='n9')[1]
    assert calls_made[-1] == 'scontrol update JobId=7 ExcNodeList=n9,n3,n5'
    assert run_script(script(), slurm, status=76)[1] == [REQUEUE], 'no node reported the fault'


def test_requeue_stops_when_restarts_are_used_without_progress(script, slurm):
    text = script(restart={'max_restarts': 3})
    assert [run_script(text, slurm, status=1, restarts=count)[1] for count in range(4)] == [[REQUEUE]] * 3 + [[]]
    progress = {'exits': '0 n1 progress\n1 n2 crash rank 3 with 1\n'}
    assert run_script(text, slurm, status=1, restarts=4, **progress) == (1, [REQUEUE])
    assert [run_script(text, slurm, status=1, restarts=count)[1] for count in (5, 6, 7)] == [[REQUEUE]] * 2 + [[]]


def test_preemptions_use_up_no_restarts_but_hangs_do(script, slurm):
    text = script(restart={'max_restarts': 1})
    for exits in ('75 n1 preempted\n', '75 n1\n', ''):
        for count in range(3):
            assert run_script(text, slurm, status=75, exits=exits, restarts=count) == (75, [REQUEUE])
    hang = '75 n1 hang no heartbeat for 900 s\n'
    assert run_script(text, slurm, status=75, exits=hang) == (75, [REQUEUE])
    assert run_script(text, slurm, status=75, exits=hang) == (75, [])


@pytest.mark.slow
def test_unresponsive_controller_is_retried(script, slurm):
    assert run_script(script(), slurm, status=1, AWAY='3') == (1, ['sleep 10'] * 3 + [REQUEUE])
    code, calls_made = run_script(script(), slurm, status=1, AWAY='1000')
    assert code == 1 and REQUEUE not in calls_made and len(calls_made) < 60


def test_user_defines_actions_by_exit_status_and_turns_requeueing_off(script, slurm):
    text = script(restart={'on_exit': {'3': 'stop', '78': 'retry'}, 'otherwise': 'stop'})
    assert [bool(run_script(text, slurm, status=status)[1]) for status in (3, 78, 1, 75)] == [False, True, False, True]
    text = script(restart={'max_restarts': 0}, overrides={'trainer.autoresume': False})
    assert run_script(text, slurm, status=75) == (75, [])


def test_failing_setup_ends_the_job_and_its_syntax_errors_are_found(script, slurm, write_spec, capsys):
    text = script(backend={'setup': 'echo setup >> "$CALLS"\nfalse'})
    environment = os.environ | {'SLURM_JOB_ID': '7', 'SRUN_STATUS': '0'}
    assert subprocess.run(['bash'], input=text, env=environment, text=True, check=False).returncode == 1
    assert slurm.read_text() == 'setup\n'
    path = write_spec('slurm', backend={'setup': 'if true; then'})
    assert 'backend.setup: job.sbatch: ' in refusal(capsys, 'launch', path, '--dry-run')


def test_each_stage_depends_on_the_previous_one(write_spec, slurm, tmp_path, capsys):
    stages = {name: {'overrides': {'name': name}} for name in ('one', 'two', 'three')}
    path = write_spec('slurm', stages=stages, backend={'logs': str(tmp_path / 'logs')})
    assert main(['launch', str(path)]) == 0
    calls = [line.split() for line in slurm.read_text().splitlines()]
    assert [Path(call[-1]).name for call in calls] == ['job-one.sbatch', 'job-two.sbatch', 'job-three.sbatch']
    assert [call[2] for call in calls[1:]] == ['--dependency=afterok:101', '--dependency=afterok:102']
    assert all('--kill-on-invalid-dep=yes' in call for call in calls[1:])
    assert 'job-three: Slurm job 103' in capsys.readouterr().out
    assert (tmp_path / 'logs').is_dir(), 'Slurm does not create the folder of its logs'


def test_status_logs_and_cancel_select_by_job_name(write_spec, slurm, tmp_path, capsys):
    path, logs = write_spec('slurm', workdir=str(tmp_path), backend={'logs': 'logs/of/jobs'}), tmp_path / 'logs/of/jobs'
    output_of(capsys, 'launch', path)
    assert f'logs: {logs} has no log of job; wait until it starts' in refusal(capsys, 'logs', path)
    (logs / 'job-of-another-8.log').write_text('of another')
    assert main(['logs', str(path)]) == 2
    capsys.readouterr()
    (logs / 'job-7.log').write_text('\n'.join(f'line {index}' for index in range(300)))
    assert output_of(capsys, 'logs', path).splitlines()[-1] == 'line 299'
    assert output_of(capsys, 'cancel', path) == 'canceled: job\n'
    assert slurm.read_text().splitlines()[1:] == ['scancel --me --name=job']
    assert output_of(capsys, 'status', path) == 'job: not in the queue; sacct --name=job shows how they ended\n'
    (tmp_path / 'bin' / 'squeue').write_text('#!/bin/bash\necho 7 job RUNNING\n')
    assert output_of(capsys, 'status', path).endswith('7 job RUNNING\n')


def test_restart_count_is_not_inherited_by_new_job_and_error_of_slurm_is_shown(
    write_spec, slurm, tmp_path, monkeypatch, capsys
):
    path, sbatch = write_spec('slurm', backend={'logs': str(tmp_path / 'logs')}), tmp_path / 'bin' / 'sbatch'
    sbatch.write_text('#!/bin/bash\necho "$SLURM_RESTART_COUNT" >> "$CALLS"\necho 101\n')
    monkeypatch.setenv('SLURM_RESTART_COUNT', '7')
    assert main(['launch', str(path)]) == 0
    assert slurm.read_text() == '0\n'
    sbatch.write_text('#!/bin/bash\necho "sbatch: error: invalid partition" >&2\nexit 1\n')
    assert main(['launch', str(path)]) == FAILED
    assert 'sbatch --parsable' in (error := capsys.readouterr().err) and 'invalid partition' in error
    for text, expected in (('echo down', 'down'), ('', 'exit status 9')):
        sbatch.write_text(f'#!/bin/bash\n{text}\nexit 9\n')
        assert main(['launch', str(path)]) == FAILED and capsys.readouterr().err.endswith(f'job.sbatch: {expected}\n')


def test_free_nodes_are_those_that_are_idle_in_the_partition(write_spec, add_program):
    listed = 'n1 idle\\nn1 idle\\nn2 idle~\\nn3 mix\\nn4 drain\\n'
    add_program('sinfo', f'#!/bin/bash\nprintf "{listed}"\n[ "$4" = --partition=gpu ] || echo n5 idle\n')
    specs = [load_job_spec(write_spec('slurm', schedule={'queue': queue})) for queue in ('gpu', None)]
    assert [free_nodes(spec) for spec in specs] == [2, 3]
