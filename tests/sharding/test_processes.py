"""Jobs of several processes: who is in one, equal bits, messages, and what a lost one does (G2)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from deepinfer_jax.cli.main import main
from sharding.errors import ShardingError
from sharding.processes import LOST_PEER, VARIABLES, Processes, find_processes, first_host


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
            if name == "command line":
                command = [sys.executable, "-m", "deepinfer_jax.cli.main", *words]
                found = (address, str(count), str(index))
                environment |= dict(zip(VARIABLES, found, strict=True))
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


@pytest.mark.parametrize(
    ("tasks", "more", "device"),
    [
        ("8(x2)", {}, 3),
        ("1(x2)", {}, None),
        ("1", {}, None),
        ("12", {}, 3),
        (None, {}, 3),
        ("8", {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    ],
)
def test_one_process_of_a_host_has_all_its_devices(tasks, more, device):
    environment = {
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
        **({} if tasks is None else {"SLURM_STEP_TASKS_PER_NODE": tasks}),
        **more,
    }
    found = find_processes(environment)
    assert (found.index, found.device) == (11, device)


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

    def call(name, source):
        code = (
            "import sys, hashlib, deepinfer_jax as di\n"
            f"from tests.sharding.mesh_runs import {name} as run\n"
            "print(hashlib.sha256(run(di.load(sys.argv[1]))).hexdigest())"
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
    expected = alone("engine", "tiny_v41")
    assert found == [expected, *["followed"] * (count - 1)]


@pytest.mark.multi
@pytest.mark.accept(10)
def test_all_processes_place_experts_again_between_the_same_steps(job, alone):
    options = {"rebalance_steps": 3, "rebalance_gain": 0.0, "redundant_experts": 4}
    found = results(job("engine", 2, "tiny_v41", json.dumps(MESHES[0][1]), json.dumps(options)))
    assert found == [alone("engine", "tiny_v41"), "followed"]


def outputs(processes):
    """What the processes of a job wrote, once all have ended well."""
    for process, _, err in processes:
        assert process.wait() == 0, text_of(err)[-3000:]
    return [text_of(out) for _, out, _ in processes]


GENERATE = ("generate", "Mara lives in", "--max-tokens", "8", "--max-seqs", "2", "--max-len", "128")


@pytest.mark.multi
@pytest.mark.accept(10)
def test_the_command_line_starts_the_processes_of_a_job(job, root):
    command = [sys.executable, "-m", "deepinfer_jax.cli.main", *GENERATE]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    alone = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    first, second = outputs(job("command line", 2, *GENERATE, "--distributed"))
    assert len(first.strip()) > 10
    assert first == alone.stdout
    assert second == ""


@pytest.mark.multi
@pytest.mark.accept(10)
def test_a_server_of_two_processes_answers_and_ends(job):
    port = free_address().partition(":")[2]
    options = ("--port", port, "--max-seqs", "2", "--max-len", "128", "--distributed")
    processes = job("command line", 2, "serve", "nano", *options)
    until = time.monotonic() + 400
    while "ready at" not in text_of(processes[0][2]):
        ended = [process.poll() for process, _, _ in processes]
        assert ended == [None, None], [text_of(err)[-2000:] for _, _, err in processes]
        assert time.monotonic() < until
        time.sleep(0.5)

    def ask(**more):
        body = {"model": "nano", "max_tokens": 8, "temperature": 0, **more}
        body["thinking"] = {"type": "disabled"}
        body["messages"] = [{"role": "user", "content": "Say as json where Mara lives."}]
        url = f"http://localhost:{port}/v1/chat/completions"
        kind = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    first = ask()
    assert len(first) > 2
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(response_format={"type": "json_object"})
    assert refused.value.code == 400
    assert b"whose masks do not travel" in refused.value.read()
    assert ask() == first
    processes[0][0].send_signal(signal.SIGTERM)
    outputs(processes)


def test_a_process_without_a_job_says_what_to_set(capsys, monkeypatch):
    for name in (*VARIABLES, "SLURM_STEP_NODELIST", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main([*GENERATE, "--distributed"])
    assert ended.value.code == 2
    assert "set DEEPINFER_COORDINATOR, DEEPINFER_PROCESSES" in capsys.readouterr().err


def test_a_mesh_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main([*GENERATE, "--mesh", "dp=2;cp=2"])
    assert '--mesh is a list like "er=1,dp=8,cp=1"' in capsys.readouterr().err


@pytest.mark.multi
@pytest.mark.accept(10)
def test_messages_arrive_whole_and_in_order(job):
    assert results(job("messages", 3)) == [True] * 3


@pytest.mark.multi
@pytest.mark.accept(10)
@pytest.mark.parametrize(
    "role",
    [("endless", "collectives"), ("endless", "messages"), ("serving", "tiny_v41", '{"dp":4}')],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_others(job, role, victim):
    processes = job(role[0], 2, *role[1:])
    until = time.monotonic() + 300
    while not all("running" in text_of(out) for _, out, _ in processes):
        assert time.monotonic() < until, [text_of(err)[-1500:] for _, _, err in processes]
        time.sleep(0.2)
    processes[victim][0].send_signal(signal.SIGKILL)
    survivor, _, err = processes[1 - victim]
    assert survivor.wait(timeout=30) in (LOST_PEER, -signal.SIGABRT)
    assert survivor.returncode != LOST_PEER or "ends at step" in text_of(err)
