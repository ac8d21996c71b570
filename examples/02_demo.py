"""A story and a JSON extraction by nano, both checked; `make demo` runs this."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import deepinfer_jax as di
from deepinfer_jax.training.corpus import Item, check_story
from deepinfer_jax.training.evaluate import demo_rows, judge, make_trial, make_trials


def main() -> None:
    """Continues a story, extracts fields, says whether each is right and what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the story and of the record")
    parser.add_argument("--prompt", help="a text to continue instead of them")
    parser.add_argument("--schema", help="file with a JSON schema that the continuation follows")
    options = parser.parse_args()
    if options.schema is not None and options.prompt is None:
        parser.error("a schema is for an answer to a prompt of your own: give --prompt too")

    started = time.perf_counter()
    llm = di.LLM("nano", runtime=di.RuntimeConfig(max_seqs=2, max_tokens_per_step=64, max_len=512))
    loaded = time.perf_counter()
    print(f"demo: load {loaded - started:.1f} s", flush=True)
    llm.generate([[llm.model.config.bos_token_id]], di.SamplingParams(max_tokens=1))
    compiled = time.perf_counter()
    print(f"demo: compile {compiled - loaded:.1f} s", flush=True)
    story, extraction = demo_rows()
    if options.prompt is None:
        trials = [t for row in (story, extraction) for t in make_trials(llm, row, options.seed)]
    else:
        text = Item(task="story", key="prompt", prompt=options.prompt, answer="")
        trials = [make_trial(llm, story, text, options.seed)]
    if options.schema is not None:
        grammar = di.Grammar.json_schema(json.loads(Path(options.schema).read_text()))
        trials = [replace(t, params=replace(t.params, grammar=grammar)) for t in trials]
    outputs = llm.generate([list(t.prompt_ids) for t in trials], [t.params for t in trials])
    print(f"demo: generate {time.perf_counter() - compiled:.1f} s", flush=True)

    for trial, output in zip(trials, outputs, strict=True):
        print(f"\n{trial.row.name}:")
        if trial.item.is_raw:
            print(f"{trial.item.prompt} ...{output.text}")
        else:
            print(f"{trial.item.messages[-2].content}\n... {output.text}")
        if options.schema is not None:
            print(f"follows the schema: {'yes' if output.finish_reason == 'stop' else 'no, cut'}")
            continue
        verdict = "yes" if judge(trial, output).correct else "no"
        if trial.row is extraction:
            print(f"correct: {verdict}")
        else:
            print(f"consistent: {verdict}{story_problems(trial.item.prompt + output.text)}")


def story_problems(text: str) -> str:
    """Returns what is wrong with a story, for people who gave their own prompt."""
    report = check_story(text)
    problems = [*report.contradictions, *(f"unknown form: {s}" for s in report.unknown)]
    if report.repeated >= 3:
        problems.append(f"a sentence {report.repeated} times")
    return "".join(f"\n  {problem}" for problem in problems)


if __name__ == "__main__":
    main()
