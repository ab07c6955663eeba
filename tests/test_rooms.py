"""The house: which room may import which, and how large rooms and files may grow."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "xe_retrieval"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each room and the rooms it may import. `model` may read checkpoints, nothing else of training.
CONFIG, PREPARE = {"config"}, {"preparation"}
DATA = CONFIG | PREPARE | {"data"}
TOWERS = DATA | {"towers"}
LOSSES = TOWERS | {"losses"}
TRAINING = LOSSES | {"training"}
MODEL = TOWERS | {"model", "training.checkpoint_reader"}
EMBED = MODEL | {"embed", "search.image_sources"}
EVALUATION = TRAINING | MODEL | {"evaluation"}
CALIBRATION = EVALUATION | EMBED | {"calibration"}
RERANKING = CALIBRATION | {"reranking"}
ROOMS = {
  "config": CONFIG,
  "preparation": CONFIG | PREPARE,
  "data": DATA,
  "towers": TOWERS,
  "losses": LOSSES,
  "training": TRAINING,
  "model": MODEL,
  "embed": EMBED,
  "evaluation": EVALUATION,
  "calibration": CALIBRATION,
  "reranking": RERANKING,
  "report": CALIBRATION | {"report"},
  "search": RERANKING | {"search"},
  "zero_shot": CALIBRATION | {"search.image_sources", "zero_shot"},
  "serving": RERANKING | {"search", "serving"},
  "planning": TRAINING | {"planning", "report.plots"},
}


def imported(path):
  """Modules of the package that a file imports anywhere, without the package's name."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
      for name in node.names:
        yield f"{node.module}.{name.name}".removeprefix(f"{PACKAGE.name}.")
    elif isinstance(node, ast.Import):
      yield from (
        n.name.removeprefix(f"{PACKAGE.name}.")
        for n in node.names
        if n.name.startswith(f"{PACKAGE.name}.")
      )


def allowed(module, rooms):
  return any(module == room or module.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
  for path in FILES:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    command = parts[-1] == "__main__"  # commands join the rooms
    if parts[0] == room and not command:
      wrong = [m for m in imported(path) if not allowed(m, ROOMS[room])]
      assert not wrong, f"{path.name} of {room} imports {wrong}"


def test_every_room_is_in_the_list():
  folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
  assert folders <= ROOMS.keys()


def test_rooms_and_files_stay_small():
  for folder in {path.parent for path in FILES}:
    assert len(list(folder.glob("*.py"))) <= 12, folder
  for path in FILES:
    assert len(path.read_text().splitlines()) <= 300, path


def test_the_check_would_notice():
  assert "training.loop" in set(imported(PACKAGE / "main.py"))
  assert allowed("training.checkpoint_reader.read_model", ROOMS["model"])
  assert not allowed("training.checkpoints.Checkpoints", ROOMS["model"])
  assert not allowed("search.collection", ROOMS["evaluation"])
