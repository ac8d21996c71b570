"""One process of a job of several: `python process_runs.py NAME ADDRESS COUNT INDEX ARGUMENTS`."""

import hashlib
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from sharding.processes import Channel, Processes, join, run_or_end


def digest(source, mesh):
    """A hash of logits of several sequences in uneven chunks, on a mesh of all devices."""
    import deepinfer_jax as di
    from tests.sharding.mesh_runs import cached_rows

    model = di.load(source, mesh=json.loads(mesh))
    return hashlib.sha256(cached_rows(model)).hexdigest()


def engine(source, mesh, options="{}"):
    """Requests in the first process, steps in all: a hash of what they return.

    options: of the runtime, with which experts may be placed again.
    """
    import jax

    import deepinfer_jax as di
    from tests.sharding.mesh_runs import answers, engine_runtime

    model, more = di.load(source, mesh=json.loads(mesh)), json.loads(options)
    with di.LLM(model, runtime=engine_runtime(model.config, **more)) as llm:
        if jax.process_index() > 0:
            llm.follow()
            return "followed"
        found = answers(llm)
        assert not more or llm.stats().experts.moved_slots > 0
    return hashlib.sha256(found).hexdigest()


def serving(source, mesh):
    """Requests for ever in the first process."""
    import jax

    import deepinfer_jax as di
    from tests.sharding.mesh_runs import engine_runtime

    model = di.load(source, mesh=json.loads(mesh))
    with di.LLM(model, runtime=engine_runtime(model.config)) as llm:
        if jax.process_index() > 0:
            print("running", flush=True)
            return llm.follow()
        while True:
            llm.generate([[3, 4, 5]], di.SamplingParams(max_tokens=8), progress=False)
            print("running", flush=True)


def messages():
    """What the first process sends reaches the others in order, long messages too."""
    import jax

    channel, sent = Channel(), [b"", b"one", bytes(range(256)) * 20_000, *[b"x"] * 100]
    if jax.process_index() == 0:
        for message in sent:
            channel.send(message)
        return True
    return [channel.receive(30) for _ in sent] == sent


def endless(role):
    """Steps for ever: collectives, or messages that the others wait for."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from sharding.mesh import AXES, build_mesh

    mesh = build_mesh({"dp": jax.device_count()})
    spec = PartitionSpec(AXES)
    turn = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, AXES, [(i, (i + 1) % 4) for i in range(4)]),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )
    step, channel = [0], Channel()

    def work():
        x = jnp.zeros((jax.device_count(), 8))
        while True:
            if role == "messages":
                channel.send(b"") if jax.process_index() == 0 else channel.receive(60)
            jax.block_until_ready(turn(x))
            step[0] += 1
            if step[0] == 3:
                print("running", flush=True)

    return run_or_end(work, lambda: step[0])


if __name__ == "__main__":
    name, address, count, index, *arguments = sys.argv[1:]
    job = Processes(coordinator=address, count=int(count), index=int(index))
    join(job, wait_seconds=60)
    print(json.dumps(globals()[name](*arguments)), flush=True)
