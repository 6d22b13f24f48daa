"""A reader of one warm training step opens at most 30 files and 180 functions."""

from benchmarks.cases.reading import walk_through_step


def test_a_warm_step_enters_few_files_and_functions() -> None:
    walk = walk_through_step(n=1_200, posterior=False)
    files = walk.files()
    assert 20 <= len(files) <= 30
    assert 120 <= sum(files.values()) <= 180
