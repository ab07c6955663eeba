"""RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020, a hundred languages): BERT whose
positions count from the id of padding + 1."""

import dataclasses
import functools

from xe_retrieval.towers.families import bert


def fields(theirs, file):
  return bert.fields(theirs, file) | {"pad": theirs.pad_token_id}


ROBERTA = dataclasses.replace(
  bert.BERT,
  name="roberta",
  model_types=("roberta", "xlm-roberta", "camembert"),
  fields=fields,
  tower=functools.partial(bert.tower, token_types=1, after_pad=True, pad=1),
  export=functools.partial(bert.export, kind="Roberta"),  # XLM-R has the same architecture
  aliases=((r"^roberta\.", ""),),
)
