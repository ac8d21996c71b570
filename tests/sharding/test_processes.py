"""Jobs of several processes: who is in one, equal bits, messages, and what a lost one does (G2)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from sharding.errors import ShardingError
from sharding.processes import LOST_PEER, Processes, find_processes, first_host


def free_address():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return f"localhost:{one.getsockname()[1]}"


@pytest.fixture
def job(root, fixtures_dir, tmp_path):
    """Starts the processes of a job; ends those that are left."""
    started = []

    def start(name, count, *arguments):
        words = [str(fixtures_dir / a) if a.startswith("tiny") else a for a in arguments]
        script = str(root / "tests" / "sharding" / "process_runs.py")
        address = free_address()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
        for index in range(count):
            out = (tmp_path / f"{index}.out").open("w+")
            err = (tmp_path / f"{index}.err").open("w+")
            command = [sys.executable, script, name, address, str(count), str(index), *words]
            started.append(
                (
                    subprocess.Popen(command, env=environment, cwd=root, stdout=out, stderr=err),
                    out,
                    err,
                )
            )
        return started

    yield start
    for process, out, err in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        out.close()
        err.close()


def text_of(file):
    file.flush()
    file.seek(0)
    return file.read()


def results(processes):
    found = []
    for process, out, err in processes:
        code = process.wait()
        assert code == 0, text_of(err)[-3000:]
        found.append(json.loads(text_of(out).splitlines()[-1]))
    return found


def test_arguments_win_over_the_environment_and_that_over_slurm():
    slurm = {
        "SLURM_STEP_NODELIST": "gpu[07-12,15]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_JOB_ID": "4097",
    }
    found = find_processes(slurm)
    assert found == Processes(coordinator="gpu07:61441", count=2, index=1)
    own = {"DEEPINFER_COORDINATOR": "a:1", "DEEPINFER_PROCESSES": "4", "DEEPINFER_PROCESS": "3"}
    assert find_processes(slurm | own) == Processes(coordinator="a:1", count=4, index=3)
    given = {"coordinator": "b:2", "count": 3, "index": 0}
    assert find_processes(slurm | own, **given) == Processes(coordinator="b:2", count=3, index=0)


def test_one_process_is_no_job():
    assert find_processes({}) is None
    assert (
        find_processes({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
        is None
    )


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2"}, "index missing from SLURM"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "coordinator missing from SLURM"),
        ({"DEEPINFER_COORDINATOR": "a:1"}, "set DEEPINFER_PROCESSES, DEEPINFER_PROCESS"),
        (
            {"DEEPINFER_COORDINATOR": "a:1", "DEEPINFER_PROCESSES": "x", "DEEPINFER_PROCESS": "0"},
            "whole numbers",
        ),
        (
            {"DEEPINFER_COORDINATOR": "a", "DEEPINFER_PROCESSES": "2", "DEEPINFER_PROCESS": "2"},
            "host:port",
        ),
    ],
)
def test_a_job_that_is_half_described_says_what_is_missing(environment, word):
    with pytest.raises(ShardingError, match=word):
        find_processes(environment)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-12,15],x1", "gpu07"),
        ("a,b[1-2]", "a"),
        ("r[3,5]", "r3"),
    ],
)
def test_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.fixture
def alone(root, fixtures_dir):
    """A function that gives the hash that one process on one device finds."""

    def call(name, source, **options):
        code = (
            "import sys, hashlib, deepinfer_jax as di\n"
            f"from tests.sharding.mesh_runs import {name} as run\n"
            f"print(hashlib.sha256(run(di.load(sys.argv[1]), **{options})).hexdigest())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(fixtures_dir / source)],
            cwd=root,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    return call


MESHES = [(2, {"dp": 2, "cp": 2}), (4, {"er": 2, "dp": 2, "cp": 2})]


@pytest.mark.multi
@pytest.mark.accept(10)
@pytest.mark.parametrize(("count", "mesh"), MESHES)
def test_processes_have_the_bits_of_one_device(job, alone, count, mesh):
    found = results(job("digest", count, "tiny_v41", json.dumps(mesh)))
    assert set(found) == {alone("cached_rows", "tiny_v41")}


@pytest.mark.multi
@pytest.mark.accept(10)
@pytest.mark.parametrize(("count", "mesh"), MESHES)
def test_an_engine_over_processes_has_the_bits_of_one_device(job, alone, count, mesh):
    found = results(job("engine", count, "tiny_v41", json.dumps(mesh)))
    expected = alone("engine", "tiny_v41", with_records=False)
    assert found == [expected, *["followed"] * (count - 1)]


@pytest.mark.multi
@pytest.mark.accept(10)
def test_messages_arrive_whole_and_in_order(job):
    assert results(job("messages", 3)) == [True] * 3


@pytest.mark.multi
@pytest.mark.accept(10)
@pytest.mark.parametrize("role", ["collectives", "messages"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_others(job, role, victim):
    processes = job("endless", 2, role)
    until = time.monotonic() + 90
    while not all("running" in text_of(out) for _, out, _ in processes):
        assert time.monotonic() < until, [text_of(err)[-1500:] for _, _, err in processes]
        time.sleep(0.2)
    processes[victim][0].send_signal(signal.SIGKILL)
    survivor, _, err = processes[1 - victim]
    assert survivor.wait(timeout=30) in (LOST_PEER, -signal.SIGABRT)
    assert survivor.returncode != LOST_PEER or "ends at step" in text_of(err)
