"""Request and response bodies of the API, as in its OpenAPI description."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from xe_retrieval.serving.service import LIMITS

_Text = Annotated[
  str, StringConstraints(min_length=1, max_length=LIMITS["query"], pattern=r"\S", strict=True)
]


class Error(BaseModel):
  detail: str = Field(description="One sentence.")


class Batch(BaseModel):
  """Several queries, cut in the same way: at most one of the four minima and maxima."""

  model_config = ConfigDict(extra="forbid")
  queries: list[_Text] = Field(min_length=1, max_length=LIMITS["batch"])
  min_probability: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, strict=True)
  max_wrong: float | None = Field(None, ge=0, allow_inf_nan=False, strict=True)
  min_precision: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, strict=True)
  threshold: float | None = Field(None, ge=-1, le=1, allow_inf_nan=False, strict=True)
  guarantee: bool = Field(False, strict=True)
  top: int = Field(20, ge=1, le=LIMITS["top"], strict=True)
  near: int = Field(0, ge=0, le=LIMITS["top"], strict=True)


class Result(BaseModel):
  id: str
  image: str = Field(description="File name in the folder, or record in the data set.")
  url: str = Field(description="Address of the thumbnail on this server.")


class Scored(Result):
  score: float = Field(description="Cosine.")


class Hit(Scored):
  probability: float | None = Field(
    description="That the image is relevant to the query in this collection; null: not evaluated."
  )


class Expect(BaseModel):
  """What a cut gives in a collection of this size, in the mean over queries."""

  precision: float | None = Field(description="Null: measured on too few pairs.")
  precision_at_least: float | None = Field(description="Lower bound with 90 % confidence.")
  recall: float
  results_per_query: float
  wrong_per_query: float


class Answer(BaseModel):
  query: str
  relevant: bool = Field(description="Whether there are results.")
  words: bool = Field(
    description="Whether the query is a few known words, which has another meaning than a caption."
  )
  familiar: bool = Field(description="False: unlike the captions the model was trained on.")
  suggestions: list[str] = Field(description="Training captions nearest to an unfamiliar query.")
  threshold: float | None = Field(
    description="Score that this query's results need; null: what is asked for cannot be reached."
  )
  best_score: float
  best_probability: float | None
  expect: Expect | None
  results: list[Hit]
  near_misses: list[Hit] = Field(
    description="The best images below the threshold; none if there are `top` results or more."
  )


class Caption(BaseModel):
  caption: str
  score: float
  probability: float | None


class Similar(BaseModel):
  image: Result
  images: list[Scored]
  captions: list[Caption]


class ExpectFrom(Expect):
  min_probability: float


class Meaning(BaseModel):
  relevant: str = Field(description="When an image counts as relevant.")
  expect: list[ExpectFrom] = Field(description="For every whole percent, in this collection.")


class Calibration(Meaning):
  """How probabilities were measured."""

  measured_on: str
  relevance: str = Field(description="Source of relevance: truth, people, captions or pairing.")
  images: int = Field(description="Images that were searched, distractors included.")
  default: float = Field(description="Minimum probability if nothing else is asked for.")
  bank: bool = Field(description="Whether unfamiliar queries are noticed.")
  words: Meaning | None = Field(description="The same for queries of a few known words.")


class About(BaseModel):
  images: int
  captions: int
  generation: str
  step: int | None
  scores: str = Field(description="What scores are: cosines, or how a bank corrects them.")
  calibration: Calibration | None = Field(description="Null: the model was not evaluated.")
  examples: list[str]
  limits: dict[str, int]
