"""`deepinfer-jax bench mask`: verdicts are right, and files are as MaskBench has them."""

import json

import pytest

from deepinfer_jax.cli.main import main
from deepinfer_jax.cli.mask_points import MaskCase, measure, own_cases, read_cases, summary
from deepinfer_jax.errors import InputError

pytestmark = pytest.mark.accept(11)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
GOOD, BAD = {"valid": True, "data": {"n": 1}}, {"valid": False, "data": {"n": 3}}


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "mask", *arguments])
    return ended.value.code, capsys.readouterr()


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def test_own_schemas_are_right_and_every_token_is_timed(vocabulary, tokenizer):
    points = list(measure(own_cases(), vocabulary, tokenizer))
    assert all(point.is_right for point in points), points
    for case, point in zip(own_cases(), points, strict=True):
        valid = [json.dumps(data, ensure_ascii=False) for ok, data in case.instances if ok]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in valid]
        assert len(point.mask_us) == sum(map(len, ids)) > 0
        assert min(point.mask_us) > 0 < point.first_ms


def test_wrong_verdicts_and_refusals_are_counted(vocabulary, tokenizer):
    cases = [
        MaskCase(name="lies", schema=SCHEMA, instances=((True, {"n": 3}), (False, {"n": 1}))),
        MaskCase(name="half", schema=SCHEMA, instances=((True, {"n": 1}), (True, {"n": 7}))),
        MaskCase(name="no", schema={"not": {}}, instances=((True, 1),)),
        MaskCase(name="none", schema=SCHEMA, instances=()),
    ]
    points = {point.name: point for point in measure(cases, vocabulary, tokenizer)}
    assert (points["lies"].accepted, points["lies"].rejected) == (1, 1)
    assert (points["half"].accepted, points["half"].rejected) == (0, 1)
    assert "not" in (points["no"].refused or "")
    found = summary(list(points.values()))
    counts = ("schemas", "right", "refused", "accept_invalid", "reject_valid", "with_instances")
    assert [found[name] for name in counts] == [4, 0, 1, 1, 2, 3]


def test_a_folder_of_maskbench(tmp_path, capsys):
    write(tmp_path, a={"description": "d", "schema": SCHEMA, "tests": [GOOD, BAD]})
    write(tmp_path, b={"schema": {"type": "array", "uniqueItems": True}, "tests": [GOOD]})
    out = tmp_path / "out" / "found.json"
    out.parent.mkdir()
    code, said = run(capsys, "--data", str(tmp_path), "--json", str(out))
    assert code == 0, said.err
    assert "2 schemas: 1 right, 1 refused" in said.out
    record = json.loads(out.read_text())
    first, second = record["points"]
    assert (first["name"], first["instances"], first["refused"]) == ("a", 2, None)
    assert first["mask_us"]["p50"] > 0
    assert "uniqueItems" in second["refused"]
    assert record["vocabulary"] == 2048
    assert [case.name for case in read_cases(tmp_path, 1, 3)] in (["a"], ["b"])


@pytest.mark.parametrize(
    "content", [[1], {"tests": []}, {"schema": {}, "tests": [{}]}, {"schema": {}, "tests": 5}]
)
def test_other_files_are_refused(tmp_path, content):
    write(tmp_path, a=content)
    with pytest.raises(InputError, match="schema and tests"):
        read_cases(tmp_path, 5, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "/no/such/folder"], "must be a folder"),
        (["--json", "/no/such/folder/x.json"], "must exist"),
    ],
)
def test_what_is_not_there_is_refused(arguments, complaint, capsys):
    code, said = run(capsys, *arguments)
    assert code == 2
    assert complaint in said.err
