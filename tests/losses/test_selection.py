"""The k-th largest score is bit-equal to np.partition's for hard distributions and 8 devices."""

import functools

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from xe_retrieval.losses import first_bracket, pair_scores, selection, wide_counts

N, D = 192, 16


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
  monkeypatch.setattr(pair_scores, "STRIP", 32)
  monkeypatch.setattr(first_bracket, "SAMPLE", 8)
  monkeypatch.setattr(selection, "SLOTS", 4)


def embeddings(kind):
  random = np.random.default_rng(0)
  x, y = random.normal(size=(2, N, D))
  first = np.eye(1, D)
  if kind == "tied":
    x, y = np.ones_like(x), np.ones_like(y)
  elif kind == "bimodal":
    x, y = np.where(random.random((N, 1)) < 0.5, 1, -1) + 0.1 * x, 1 + 0.1 * y
  elif kind == "row-correlated":
    x, y = x + 3 * random.normal(size=(N, 1)) * first, 0.03 * y + 5 * first
  elif kind == "column-correlated":
    y, x = x + 3 * random.normal(size=(N, 1)) * first, 0.03 * y + 5 * first
  elif kind == "nearly constant":
    x, y = 1 + 1e-4 * x, 1 + 1e-4 * y
  elif kind == "many zeros":
    x *= random.random((N, 1)) < 0.3
  elif kind == "sorted":
    x, y = 0.1 * x + np.sort(x[:, :1], axis=0), 0.1 * y + np.sort(y[:, :1], axis=0)
  length = np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)
  y /= np.linalg.norm(y, axis=1, keepdims=True)
  ids = random.integers(0, N, N).astype(np.int32)
  return (20 * x / length).astype(np.float32), y.astype(np.float32), (ids,)


@jax.jit
def scores_of(x, y, ids):
  """The whole matrix, computed in the same strips."""

  def step(_, strip):
    (x, row_ids), real = strip
    return None, pair_scores.scores(x, y, row_ids, ids, real)

  _, scores = jax.lax.scan(step, None, pair_scores.strips((x, ids), len(y)))
  return scores.reshape(-1, len(y))[: len(y)]


@functools.cache
def select(keep, devices):
  if not devices:
    return jax.jit(functools.partial(selection.kth_largest, keep=keep))
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])
  local = functools.partial(selection.kth_largest, keep=keep, axis="data")
  return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))


select_of_rows = jax.jit(selection.kth_largest_of_rows, static_argnums=1)


def check(mined, scores, keep):
  scores = scores[scores > -np.inf]
  k = int(np.ceil(keep * len(scores)))
  expected = -np.partition(-scores, k - 1)[k - 1]
  assert mined.score == expected
  above, equal = np.sum(scores > expected), np.sum(scores == expected)
  assert number(mined.above) == above
  assert number(mined.equal) == equal
  np.testing.assert_allclose(above + mined.weight * equal, k, rtol=1e-6)


def number(limbs):
  return (int(limbs[0]) << wide_counts.BITS) + int(limbs[1])


KINDS = [
  "normal",
  "tied",
  "bimodal",
  "row-correlated",
  "column-correlated",
  "nearly constant",
  "many zeros",
  "sorted",
]


@pytest.mark.parametrize("keep", [0.5, 1e-4, 0.999])
@pytest.mark.parametrize("kind", KINDS)
def test_any_scores(kind, keep):
  batch = embeddings(kind)
  check(select(keep, None)(*batch), np.asarray(scores_of(*batch)), keep)


@pytest.mark.parametrize("kind", ["normal", "nearly constant", "many zeros"])
def test_eight_devices(kind):
  x, y, ids = embeddings(kind)
  mined = select(0.5, 8)(x, y, ids)
  rows = N // 8  # rows of a device; products of another shape may round differently
  scores = [
    pair_scores.scores(x[i : i + rows], y, (ids[0][i : i + rows],), ids) for i in range(0, N, rows)
  ]
  check(mined, np.concatenate(scores), 0.5)


@pytest.mark.parametrize("keep", [0.5, 0.03])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, keep):
  scores = np.asarray(scores_of(*embeddings(kind)))
  score, weight = select_of_rows(scores, keep)
  for row, found, share in zip(scores, score[:, 0], weight[:, 0], strict=True):
    row = row[row > -np.inf]
    k = int(np.ceil(keep * len(row)))
    assert found == -np.partition(-row, k - 1)[k - 1]
    np.testing.assert_allclose(np.sum(row > found) + share * np.sum(row == found), k, rtol=1e-6)


@pytest.mark.parametrize("pairs", [0, 1, 2**31 - 1, 2**31, 46_341**2, 65_536**2, 10**6 * 10**6])
@pytest.mark.parametrize(
  "keep, p, q", [(0.5, 1, 2), (0.1, 1, 10), (1e-4, 1, 10_000), (2 / 3, 2, 3)]
)
def test_shares_of_more_than_32_bits(pairs, keep, p, q):
  limbs = jnp.array([pairs >> wide_counts.BITS, pairs & wide_counts.MASK], jnp.int32)
  assert number(wide_counts.share(limbs, keep)) == -(-pairs * p // q)


@functools.cache
def mesh_of_8():
  return jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))


@functools.cache
def count_over_8_devices():
  local = functools.partial(wide_counts.count, axis="data")
  return jax.jit(jax.shard_map(local, mesh=mesh_of_8(), in_specs=P("data"), out_specs=P()))


def test_counts_of_many_devices_do_not_overflow():
  rows = jax.device_put(
    np.full((8, 2**20), 2_047, np.int32), jax.sharding.NamedSharding(mesh_of_8(), P("data"))
  )
  assert number(count_over_8_devices()(rows)) == 8 * 2**20 * 2_047


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
  hypothesis.extra.numpy.arrays(np.int32, (8, 64), elements=st.integers(0, 2**31 - 1))
)
def test_counts_are_those_of_python_integers(columns):
  counted = count_over_8_devices()(columns)
  assert number(counted) == sum(map(int, columns.ravel()))
  assert 0 <= counted[1] <= wide_counts.MASK
  assert number(wide_counts.count(jnp.asarray(columns[0]))) == sum(map(int, columns[0]))


def test_more_columns_than_can_be_counted_are_refused():
  too_many = jax.ShapeDtypeStruct((1, 2**20 + 1), jnp.int32)
  with pytest.raises(ValueError, match="pairs of 1,048,577 rows cannot be counted"):
    jax.eval_shape(wide_counts.count, too_many)


def test_counts_of_more_than_32_bits():
  columns = np.random.default_rng(0).integers(0, 70_000, 70_000)
  total = int(columns.sum())
  assert total > 2**31
  counted = wide_counts.count(jnp.asarray(columns, jnp.int32))
  assert number(counted) == total
  one = jnp.array([0, 1])
  assert wide_counts.at_least(counted, counted)
  assert wide_counts.at_least(counted + one, counted)
  assert not wide_counts.at_least(counted - one, counted)


def test_integers_keep_the_order_of_floats():
  values = np.array([-np.inf, -3e38, -1, -1e-30, 0, 1e-30, 1, 3e38, np.inf], np.float32)
  integers = np.asarray(wide_counts.to_int(values))
  assert np.all(np.diff(integers.astype(np.int64)) > 0)
  np.testing.assert_array_equal(wide_counts.to_score(integers), values)
