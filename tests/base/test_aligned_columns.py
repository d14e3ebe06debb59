"""Columns of text: their width, and names that are too long or written in wide characters."""

from stepjepa.base.columns import WIDTH, aligned_columns, numbered_names


def test_columns_of_wide_characters_and_accents_are_aligned() -> None:
    rows = [("中文", "1"), ("e\u0301te\u0301", "10"), ("plain", "100")]
    assert aligned_columns(("arm", "runs"), rows).splitlines() == [
        "arm    runs",
        "-----  ----",
        "中文      1",
        "e\u0301te\u0301      10",
        "plain   100",
    ]


def test_long_names_are_numbered_and_no_line_is_wider_than_a_terminal() -> None:
    paths = [f"runs/of/a/sweep/with/long/names/of/folders/model-{place}/seed82" for place in range(5)]
    names, legend = numbered_names(paths)
    rows = [(f"figure {place}", *("1.2345e-10" for _ in paths)) for place in range(3)]
    text = f"{legend}{aligned_columns(('', *names.values()), rows)}"
    assert list(names.values()) == ["(1)", "(2)", "(3)", "(4)", "(5)"] and f"(5) {paths[4]}" in text
    assert max(map(len, text.splitlines())) <= WIDTH
