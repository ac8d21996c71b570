"""`deepinfer-jax replay`: runs the request of a run record again and compares what comes out."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.engine.output import RequestOutput
    from deepinfer_jax.loading import Model
    from deepinfer_jax.record.run_record import RunRecord


def replay(
    path: Annotated[Path, typer.Argument(metavar="RECORD", help="A file of RunRecord.write.")],
    model: Annotated[
        str | None, typer.Option(help="Where the model is, if not where the record says.")
    ] = None,
    ignore_weights: Annotated[
        bool, typer.Option(help="Go on with other weights, to see what they change.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the record of the replay.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="An image of the prompt; one option for each, in order."),
    ] = None,
) -> None:
    """Runs the request of RECORD alone and compares tokens, and hashes of logits if recorded.

    Another config, weights, numerics, level or option is refused by name. Without outputs in the
    record, what comes out is printed. Exit code: 0 equal or nothing to compare, 1 different, 2
    refused.
    """
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.record.compare import output_difference
    from deepinfer_jax.record.run_record import read_record

    record = read_record(path)
    runtime = lone_runtime(record)
    loaded = load_recorded(record, model)
    check_same(record, loaded, runtime, ignore_weights=ignore_weights)
    prompt, images = recorded_prompt(record, loaded, image or [])
    with LLM(loaded, runtime=runtime) as llm:
        (output,) = llm.generate([prompt], lone_params(record, runtime), images=[images])
    found = output.record
    assert found is not None
    if save is not None:
        replace(found, request=record.request).write(save)
    if not record.outputs:
        print_output(output)
        return
    difference = output_difference(record, found)
    if difference is not None:
        typer.echo(f"different: {difference}")
        raise typer.Exit(1)
    tokens = sum(len(one.token_ids) for one in record.outputs)
    compared = "ids and logits" if record.has_logit_hashes else "ids"
    typer.echo(f"equal: {compared} of {tokens} tokens, {len(record.outputs)} completion(s)")


def load_recorded(record: "RunRecord", source: str | None) -> "Model":
    """Returns the model of a record, from where it says or from `source`.

    Raises:
        InputError: its config is another one; nothing large has been read then.
        DeepInferError: it cannot be loaded, or the level of the record cannot be held here.
    """
    from rich.console import Console

    from deepinfer_jax.backends import ascend_config, names_ascend
    from deepinfer_jax.cli.generate import load_with_bar
    from deepinfer_jax.config.hf import read_config
    from deepinfer_jax.loading import resolve_folder
    from deepinfer_jax.record.compare import first_difference
    from deepinfer_jax.record.recorder import describe_config

    source = source or str(record.model["source"])
    found = read_config(resolve_folder(source))
    if names_ascend(record.execution["kernels"]):
        found = ascend_config(found)
    config = {"config": describe_config(found)}
    refuse(first_difference({"config": record.model["config"]}, config), source)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    execution = record.execution
    return load_with_bar(
        console,
        source,
        numerics=execution["numerics"],
        determinism=execution["determinism"],
        kernels=execution["kernels"] or None,
    )


def check_same(
    record: "RunRecord", model: "Model", runtime: "RuntimeConfig", *, ignore_weights: bool
) -> None:
    """Warns on stderr of what may change bits, and refuses what is not the run of the record.

    Raises:
        InputError: weights, arithmetic or options differ; names the first field.
    """
    from deepinfer_jax.record.compare import differences, first_difference
    from deepinfer_jax.record.recorder import Recorder

    recorder = Recorder(model, runtime)
    facts = recorder.facts
    for line in differences(record.environment, facts["environment"], "environment"):
        warn(f"{line}; equal bits are not promised then")
    level = record.execution["determinism"]
    if level != "batch":
        warn(f'determinism="{level}" promises no equality with a request that ran beside others')
    weights = {"weights_sha256": record.model["weights_sha256"]}
    difference = first_difference(weights, {"weights_sha256": recorder.weights.root()})
    if difference is not None and ignore_weights:
        warn(difference)
    elif difference is not None:
        refuse(f"{difference}. --ignore-weights runs it all the same", model.source)
    for name in ("execution", "options"):
        refuse(first_difference({name: getattr(record, name)}, {name: facts[name]}), model.source)


def recorded_prompt(
    record: "RunRecord", model: "Model", files: list[Path]
) -> tuple[list[int], list[Any]]:
    """Returns the prompt of a record with one token for each image, and its images.

    Raises:
        InputError: other images than those of the record, or another number of them.
    """
    from deepinfer_jax.engine.prompt import read_images
    from deepinfer_jax.errors import InputError

    ids, spans = list(record.request["prompt_token_ids"]), record.request.get("images", [])
    if len(files) != len(spans):
        raise InputError(
            f"a record has the digests of its images and not their pixels: this one needs "
            f"{len(spans)} images, got {len(files)}. Give --image for each, in order"
        )
    images = list(read_images(model.config, files))
    for place, (one, span) in enumerate(zip(images, spans, strict=True), start=1):
        if one.digest.hex() != span["digest"]:
            raise InputError(f"image {place}, {files[place - 1]}, is not the one of the record")
    for span in reversed(spans):
        ids[span["start"] + 1 : span["start"] + span["length"]] = []
    return ids, images


def lone_runtime(record: "RunRecord") -> "RuntimeConfig":
    """Returns the runtime of the replay.

    At level "batch" what is beside a request, cached or drafted changes nothing, so it is left
    out. At other levels it may, so all is as recorded.

    Raises:
        InputError: an option of the record does not exist here.
    """
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.errors import InputError

    options = {name: value for name, value in record.options.items() if value is not None}
    fields: dict[str, Any] = {**record.runtime, **options}
    if record.outputs:
        fields["record"] = "logits" if record.has_logit_hashes else "ids"
    if record.execution["determinism"] == "batch":
        for name in ("cache_bytes", "draft_policy", "draft_length", "draft_threshold"):
            del fields[name]
        children = record.request["params"]["n"]
        fields |= {"max_seqs": children, "drafting": False, "prefix_cache": False}
    try:
        return RuntimeConfig(**fields)
    except TypeError as error:
        raise InputError(f"the record was made by another version: {error}") from error


def lone_params(record: "RunRecord", runtime: "RuntimeConfig") -> Any:
    """Returns the parameters of the request, without what depends on time or on drafts."""
    from deepinfer_jax.jobs.lines import params_from_json
    from deepinfer_jax.sampling.params import SamplingParams

    params = params_from_json(record.request["params"], SamplingParams())
    draft = None if runtime.drafting is False else params.max_draft
    return replace(params, deadline_s=None, max_draft=draft)


def print_output(output: "RequestOutput") -> None:
    """Prints the completions of a replay that has nothing to compare with: text, or ids."""
    for completion in output.outputs:
        ids = " ".join(map(str, completion.token_ids))
        typer.echo(completion.text or ids)
    typer.echo("no outputs in the record, so nothing was compared", err=True)


def refuse(difference: str | None, source: str) -> None:
    """Raises InputError if there is a difference."""
    from deepinfer_jax.errors import InputError

    if difference is not None:
        raise InputError(
            f"a replay needs what the record ran, {source} is something else: {difference}"
        )


def warn(line: str) -> None:
    """Prints a warning on stderr."""
    print(f"warning: {line}", file=sys.stderr)
