"""Files of the packages stay short, text files end with a newline, nothing huge is committed."""

from pathlib import Path

from tools import check_tree


def test_python_files_of_the_packages_stay_under_400_lines():
    problems = check_tree.length_violations(check_tree.tree_files())
    assert not problems, "\n".join(problems)


def test_text_files_end_with_a_newline_and_no_file_is_huge():
    problems = check_tree.text_violations(check_tree.tree_files())
    assert not problems, "\n".join(problems)


def test_long_file_is_reported(tmp_path):
    path = Path("deepinfer_jax/long.py")
    (tmp_path / "deepinfer_jax").mkdir()
    (tmp_path / path).write_text("x = 1\n" * 399)
    assert check_tree.length_violations([path], tmp_path) == []
    (tmp_path / path).write_text("x = 1\n" * 400)
    assert len(check_tree.length_violations([path], tmp_path)) == 1


def test_exceptions_still_exist_and_have_a_reason(root):
    for path, reason in check_tree.LONG_FILES.items():
        assert reason
        assert (root / path).is_file()
