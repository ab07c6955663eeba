"""Tables as spreadsheets and scripts write them."""

import csv

import pytest

from xe_retrieval.search.stores.table_columns import TableColumns


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_quotes(tmp_path, kind, quoting):
  """A header and cells in quotes, with quotes, tabs, commas and line breaks inside."""
  texts = ['say "a"', "tab\t, comma", "two\nlines", "plain"]
  path = tmp_path / f"table.{kind}"
  with open(path, "w", newline="") as file:
    writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",", quoting=quoting)
    writer.writerow(["image", "by"])
    # More than a block of the reader: a line break in a cell is not where one may end.
    writer.writerows([f"{i:05d}.png", texts[i % 4] * 20] for i in range(20_000))
  table = TableColumns(path)
  assert table.types == {"by": "text"}
  found = table.of([b"%05d.png" % i for i in range(20_000)])["by"].to_pylist()
  assert found == [texts[i % 4] * 20 for i in range(20_000)]
