"""A re-ranker behind a collection: reads the first candidates of a query, and orders them anew."""

import numpy as np

from xe_retrieval.reranking import evaluation, scorer, token_tables
from xe_retrieval.search.second_stage.token_files import TokenFiles, update

DIGITS = 4


def index_tokens(index, model, workdir) -> tuple[int, int]:
  """Stores what the re-ranker of `workdir` needs of every image; see token_files.update."""
  found = scorer.restore(workdir)
  return update(index, _towers(model, found, workdir), found)


class SecondStage:
  """The re-ranker of a workdir behind a Searcher."""

  def __init__(self, searcher, workdir, candidates=128):
    self.searcher, self.candidates = searcher, candidates
    self._scorer = scorer.restore(workdir)
    self._towers = _towers(searcher.model, self._scorer, workdir)
    self._mixture = evaluation.read(workdir)
    fingerprints = searcher.model.fingerprint(), self._scorer.fingerprint
    known = self._mixture
    if known is None or (known.first_stage, known.reranker) != fingerprints:
      raise ValueError(
        f"how the scores of {workdir} are added to those of this model is not known: python -m "
        f"xe_retrieval.evaluate --workdir={searcher.collection.manifest['workdir']} "
        f"--rerank={workdir} chooses it"
      )
    self._files = TokenFiles(searcher.collection.path, self._scorer.fingerprint)
    if not len(self._files.ids):
      raise ValueError(
        f"{searcher.collection.path} has no tokens of this re-ranker: python -m xe_retrieval.index "
        f"--tokens={workdir} stores them"
      )

  def order(self, queries, where=None):
    """[asking.Query] -> for each: ids uint64 [n], final scores [n] in the first stage's unit, best
    first, and probabilities. Candidates without stored tokens are left out.
    """
    vectors = np.stack([query.vector for query in queries])
    count = min(self.candidates, len(self.searcher.collection))
    ids, scores = self.searcher.collection.store.nearest(vectors, count, where)
    tokens = self._towers.text([query.text for query in queries])
    return [self._order(tokens, q, *one) for q, one in enumerate(zip(ids, scores, strict=True))]

  def _order(self, tokens, q, ids, scores):
    there = np.isfinite(scores)
    images, known = self._files.read(ids[there])
    ids, scores = ids[there][known], np.float32(scores[there][known])
    if not len(ids):
      return ids, scores, scores
    rows = np.arange(len(ids))[None]
    logits = self._scorer.logits(tokens.of(np.array([q])), images, rows, scores[None])[0]
    scale, weight = self._scorer.config.scale, self._mixture.weight
    final = scale * scores + weight * logits
    order = np.argsort(-final, kind="stable")
    final = final[order]
    return ids[order], final / scale, self._mixture.meaning.probability(final[None])[0]

  def warm_up(self):
    """Compiles for texts of every length."""
    step = token_tables.MULTIPLE
    for words in range(1, self.searcher.model.config.text.tokens + step, step):
      self.order(self.searcher.embed(["a " * words]))

  def answers(self, batches, top=20, offset=0, min_probability=None, threshold=None, **where):
    """Lists of strings -> what `search --json` prints of each, as Searcher.answers."""
    least = 0.5 if min_probability is None else min_probability
    where = self.searcher.collection.where(**where)
    for batch in batches:
      queries = self.searcher.embed(batch)
      for query, found in zip(queries, self.order(queries, where), strict=True):
        ids, scores, probabilities = found
        passes = probabilities >= least if threshold is None else scores >= threshold
        shown = np.flatnonzero(passes)[offset : offset + top]
        yield {
          "query": query.text,
          "relevant": bool(passes.any()),
          "total": int(passes.sum()),
          "familiar": query.familiar,
          "suggestions": query.suggestions,
          "threshold": threshold,
          "best_score": round(float(scores[0]), DIGITS) if len(ids) else None,
          "best_probability": round(float(probabilities[0]), DIGITS) if len(ids) else None,
          "results": [
            {
              "image": about["path"],
              "score": round(float(scores[i]), DIGITS),
              "probability": round(float(probabilities[i]), DIGITS),
            }
            for i, about in zip(shown, self.searcher.collection.describe(ids[shown]), strict=True)
          ],
        }


def _towers(model, found, workdir):
  towers = token_tables.Towers(model.config, model.variables, model.tokenizer)
  scorer.require_towers(found, towers, workdir)
  return towers
