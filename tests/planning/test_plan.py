"""The planner from config to table, on CPU devices; with the TPU compiler if it is installed."""

import csv
import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import xe_retrieval
from tests.conftest import ROOT
from xe_retrieval import plan as command
from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.planning import (
  chips,
  compile,
  compile_subprocess,
  costs,
  plan_text,
  plans,
  remedies,
  roofline,
  sweep,
)
from xe_retrieval.training import step


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  """One cache for the session, apart from the user's."""
  root = tmp_path_factory.getbasetemp() / "plans"
  monkeypatch.setenv("XDG_CACHE_HOME", str(root))
  return root


@pytest.fixture
def here(monkeypatch):
  """Compiles in this process, which saves the start of a subprocess."""

  def run(request, out, say):
    answer, program = compile.compile_step(
      pathlib.Path(out), request["config"], request["topology"], request["only"]
    )
    (pathlib.Path(out) / "answer.json").write_text(json.dumps(answer))
    with gzip.open(pathlib.Path(out) / "program.txt.gz", "wt") as f:
      f.write(program)

  monkeypatch.setattr(plans.compile_subprocess, "compile", run)


def test_the_command_prints_writes_json_and_compiles_once(config, tmp_path, cache):
  file = tmp_path / "plan.json"
  arguments = [
    "--config=configs/quickstart.py:cross_example_softmax",
    "--topology=cpu:8",
    f"--json={file}",
    *(f"--config.{k}={v}" for k, v in _flat(config).items()),
  ]
  command_line = [sys.executable, "-m", "xe_retrieval.plan", *arguments]
  first = subprocess.run(command_line, capture_output=True, text=True)
  assert first.returncode == 0, first.stderr
  for words in ("batch 16 on 8 × cpu", "optimiser state", "temporaries", "GiB: fits", "all-reduce"):
    assert words in first.stdout
  for part in ("text tower", "image tower", "loss", "optimiser", "whole step"):
    assert f"\n{part} " in first.stdout
  assert "at most" in first.stdout and "An upper bound." in first.stdout
  found = json.loads(file.read_text())
  assert found["fits"] and found["parts"]["loss"]["collectives"]["all-gather"]["count"] >= 1
  assert found["step"]["flops"] == sum(part["flops"] for part in found["parts"].values())
  (kept,) = (cache / "xe_retrieval" / "plan").iterdir()
  stamp = (kept / "answer.json").stat().st_mtime_ns
  again = plans.make(command.architecture(config), "cpu:8")
  assert (kept / "answer.json").stat().st_mtime_ns == stamp
  assert again.used == found["used_bytes"]


def test_the_plan_is_of_the_training_step(config, here):
  config = command.architecture(config)
  plan = plans.make(config, "cpu:8")
  built = step.build(config, mesh_lib.make())
  memory = built.lower().compile().memory_analysis()
  assert plan.memory["temporaries"] == memory.temp_size_in_bytes
  assert plan.memory["arguments"] == memory.argument_size_in_bytes
  params = sum(x.nbytes for x in jax.tree.leaves(_zeros(built.state.params)))
  stats = sum(x.nbytes for x in jax.tree.leaves(_zeros(built.state.batch_stats)))
  assert plan.memory["parameters"] == params + stats


@pytest.fixture
def larger(config):
  """Large activations; a frozen tower and remat, so that less is compiled."""
  config = command.architecture(config)
  config.batch_size, config.remat, config.text.mlp = 256, True, 128
  config.image.freeze = "all"
  return config


def test_remedies_fit(larger, here):
  whole = plans.make(larger, "cpu:2")
  plan = plans.make(larger, "cpu:2", limit=0.8 * whole.used)
  assert whole.fits and not plan.fits and "does not fit" in plan_text.describe(plan)
  tried = {remedy.flag: remedy for remedy in remedies.remedies(plan, larger)}
  assert list(tried) == ["--config.micro_batch=128", "--topology=cpu:4"]
  for remedy in tried.values():
    assert remedy.plan.fits and remedy.plan.used < plan.limit
    assert "fits, at most" in plan_text.remedy(remedy)


def test_sweep(larger, here, tmp_path):
  rows = [sweep.Row(name, 256, plans.make(larger, name)) for name in ("cpu:2", "cpu:4")]
  rows += [sweep.Row("cpu:2", 512, plans.make(larger, "cpu:2", limit=1))]
  rows += [sweep.Row("cpu:3", 256, None, "does not divide")]
  table = sweep.table(rows).splitlines()
  assert len(table) == 2 + 4 + 1 and "cpu:4" in table[3]
  assert table[-1] == "cpu:3, batch 256: does not divide"
  data, plot = sweep.write(tmp_path, rows)
  lines = list(csv.DictReader(data.open()))
  assert [line["fits"] for line in lines] == ["yes", "yes", "no", "error"]
  assert float(lines[0]["pairs/s"]) == pytest.approx(rows[0].plan.pairs_per_second)
  assert plot.stat().st_size > 10_000


def test_the_roofline_by_hand():
  cost = costs.Cost(flops=1e12, passes=197e12, bytes=819e9 / 2)
  cost.collectives["all-reduce", 200_000_000, 256] = 3
  cost.collectives["all-reduce", 4, 256] = 10
  times = roofline.times(cost, chips.topology("v5e:16x16"))
  assert times.compute == pytest.approx(1) and times.memory == pytest.approx(0.5)
  # Twice over four links of 50 GB/s; or latency: twice 8 + 8 hops, a microsecond each.
  assert times.interconnect == pytest.approx(3 * 2 * 1e-3 * 255 / 256 + 10 * 2 * 16e-6)
  assert times.binding == "compute" and times.bound == pytest.approx(1)


@pytest.mark.parametrize(
  "name, size, links, hops",
  [("v5e:2x4", 8, 2, 4), ("v5e:16x16", 256, 4, 16), ("v5e:8x16", 128, 3, 15),
   ("v5p:4x4x4", 64, 6, 6), ("v4:2x2x1", 4, 2, 2), ("cpu:8", 8, 2, 4)],
)  # fmt: skip
def test_topologies(name, size, links, hops):
  topology = chips.topology(name)
  assert (topology.name, topology.size, topology.links, topology.hops) == (name, size, links, hops)


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:0x4", "16x16", "v5e:axb"])
def test_an_unknown_topology_is_answered_with_the_known_ones(name):
  with pytest.raises(ValueError, match=r"v5e:2x2.*v5e:16x16.*cpu:N"):
    chips.topology(name)


def test_without_libtpu_it_says_what_to_install(config, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"v5e:2x4 needs libtpu: pip install .*\.\[plan\]"):
    plans.make(config, "v5e:2x4")


def test_where_there_is_no_tpu_only_the_compiler_loads_libtpu(tmp_path, monkeypatch):
  pci, code = tmp_path / "pci", "import xe_retrieval as x, jax; jax.devices(); "
  code += "print(jax.config.jax_platforms == 'cpu', x._libtpu_for_nothing())"
  (pci / "0000:00:04.0").mkdir(parents=True)
  (pci / "0000:00:04.0" / "vendor").write_text("0x8086\n")
  assert not xe_retrieval._libtpu_for_nothing(pci) or importlib.util.find_spec("libtpu")
  (tmp_path / "libtpu.py").write_text("get_library_path = lambda: '/dev/null'\n")
  monkeypatch.syspath_prepend(tmp_path)
  assert xe_retrieval._libtpu_for_nothing(pci)
  environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
  environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
  out = subprocess.run(
    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
  )
  chosen, for_nothing = out.stdout.split()
  assert chosen == for_nothing
  (pci / "0000:00:04.0" / "vendor").write_text("0x1ae0\n")  # Google's: perhaps a TPU
  assert not xe_retrieval._libtpu_for_nothing(pci)


def test_a_compiler_that_aborts_is_one_sentence(config, monkeypatch):
  monkeypatch.setattr(sys, "executable", "/bin/false")
  with pytest.raises(ValueError, match=r"for cpu:4 failed with exit code 1; .*v5e:16x16") as error:
    plans.make(config, "cpu:4")
  assert "\n" not in str(error.value)
  assert "signal 6 (F0 Check failed: bad)" in compile_subprocess.failure(
    "v5e:3x5", -6, "F0 Check failed: bad\n"
  )


def test_the_dump_of_xla_is_read(tmp_path):
  """Buffers as the TPU compiler lists them: color 1 is on-chip memory, not HBM."""
  (tmp_path / "dump").mkdir()
  (tmp_path / "traced.json").write_text('{"batch": 7}')
  program = tmp_path / "dump" / "m.after_optimizations_after_buffer_assignment.txt"
  program.write_text("HloModule m")
  (tmp_path / "dump" / "m.after_optimizations-buffer-assignment.txt").write_text(
    "allocation 0: size 5, parameter 0, shape |f32[8]| at ShapeIndex {}, maybe-live-out:\n"
    " value: <1 a @0> (size=5,offset=0): f32[8]\n"
    "allocation 1: size 30, output shape is |(f32[])|, maybe-live-out:\n"
    "allocation 2: size 100, color 1, preallocated-temp:\n"
    "allocation 3: size 200, preallocated-temp:\n"
    "allocation 4: size 1000, constant:\n"
  )
  compile_subprocess._read_dump(tmp_path, program, 3.0)
  answer = json.loads((tmp_path / "answer.json").read_text())
  assert [answer[k] for k in ("arguments", "results", "temporaries", "program", "batch")] == [
    *(5, 30, 200, 1000, 7)
  ]
  with gzip.open(tmp_path / "program.txt.gz", "rt") as f:
    assert f.read() == "HloModule m"


def test_impossible_configs_are_answered_before_compiling(config, here):
  config.batch_size = 15
  with pytest.raises(ValueError, match="batch_size=15 does not divide over 8 devices; 8 would"):
    plans.make(command.architecture(config), "cpu:8")


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_the_loss_on_a_pod(config):
  """The TPU compiler for 32 chips; the streaming loss is a loop over rows."""
  config.loss_implementation, config.batch_size, config.embedding_dim = "streaming", 32_768, 128
  plan = plans.make(config, "v5e:4x8", only="loss")
  loss = plan.counted.parts["loss"]
  assert loss.flops == 6 * 32_768**2 * 128 / 32
  assert loss.calls["all-gather"] == 3 and plan.used < 2**28


def _flat(config):
  """The fields in which the tests' config differs from the quickstart's, as flag values."""
  from configs import quickstart
  from xe_retrieval import config as config_lib

  plain = quickstart.get_config("cross_example_softmax")
  changed = [line[len("config.") :].split(":")[0] for line in config_lib.difference(plain, config)]
  values = {name: config_lib._get(config, name) for name in changed}
  return {k: str(v).replace(" ", "") for k, v in values.items() if k != "data.dir"}


def _zeros(tree):
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
