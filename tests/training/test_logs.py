"""The speed of a run: all steps, and nothing but steps."""

import json

from xe_retrieval.training import logs


def test_validation_and_checkpoints_do_not_count_and_steps_before_them_do(
  config, tmp_path, monkeypatch
):
  clock = [0.0]
  monkeypatch.setattr(logs.time, "perf_counter", lambda: clock[0])
  log = logs.Log(tmp_path, config, 0)
  for n in range(1, 101):
    clock[0] += 1.0  # a step
    if n % 50 == 0:
      log.train(n, {"loss": 1.0})
    if n % 7 == 0:
      with log.excluded():
        clock[0] += 1000.0
  log.close()
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
  assert [line["pairs_per_second"] for line in lines] == [config.batch_size] * 2


def test_the_time_left_is_that_of_steps_only(config, tmp_path, monkeypatch, capsys):
  clock, config.steps = [0.0], 30
  monkeypatch.setattr(logs.time, "perf_counter", lambda: clock[0])
  log = logs.Log(tmp_path, config, 0)
  for n in (10, 20):
    clock[0] += 600.0
    log.train(n, {"loss": 1.0})
    with log.excluded():
      clock[0] += 5000.0
  log.close()
  assert "10:00 left" in capsys.readouterr().out
