"""Long lists on the page: what is looked for, a hundred at a time, and how many there are."""

import pytest

from pacekeeper.controller.api.web.queries import PAGE_ROWS, TableQuery, select_page


def rows(query: dict[str, str], count: int = 250) -> tuple[list[int], str | None, str | None]:
    part = select_page(range(count), TableQuery.of(query), lambda row: f"row {row}")
    return list(part.rows), part.before, part.after


def test_a_hundred_are_shown_with_the_way_to_those_before_and_after() -> None:
    assert rows({}) == (list(range(PAGE_ROWS)), None, "?first=100")
    assert rows({"first": "100"}) == (list(range(100, 200)), "", "?first=200")
    assert rows({"first": "200"}) == (list(range(200, 250)), "?first=100", None)
    assert rows({}, count=PAGE_ROWS)[1:] == (None, None)


def test_every_word_must_be_in_a_row_in_whatever_case_and_the_search_goes_on_to_the_next_page() -> (
    None
):
    assert rows({"find": " ROW  24 "})[0] == [24, 124, 224, *range(240, 250)]
    found = select_page(
        range(250), TableQuery.of({"find": "row", "open": "1"}), lambda row: f"row {row}"
    )
    assert found.total == 250 and found.after == "?find=row&open=1&first=100"
    assert select_page(range(9), TableQuery(find="none"), str).total == 0


@pytest.mark.parametrize("first", ["-1", "x", "9" * 40, "\u0661", "", "250", "99999999"])
def test_a_page_that_is_not_there_is_the_first_one(first: str) -> None:
    assert rows({"first": first})[0][0] == 0


def test_an_address_can_not_carry_a_book() -> None:
    assert len(TableQuery.of({"find": "x" * 10_000}).query()) < 300
    assert TableQuery.of({"find": "a&b=<c>"}).query() == "?find=a%26b%3D%3Cc%3E"
