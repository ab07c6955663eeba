"""What the API takes and gives, as OpenAPI shows it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from xe_retrieval.serving.state import LIMITS

_Text = Annotated[
  str, StringConstraints(min_length=1, max_length=LIMITS["query"], pattern=r"\S", strict=True)
]


class Error(BaseModel):
  detail: str = Field(description="One sentence.")


class Batch(BaseModel):
  """Several queries with one threshold."""

  model_config = ConfigDict(extra="forbid")
  queries: list[_Text] = Field(min_length=1, max_length=LIMITS["batch"])
  min_precision: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, strict=True)
  threshold: float | None = Field(None, ge=-1, le=1, allow_inf_nan=False, strict=True)
  top: int = Field(20, ge=1, le=LIMITS["top"], strict=True)
  near: int = Field(0, ge=0, le=LIMITS["top"], strict=True)


class Result(BaseModel):
  id: str
  image: str = Field(description="Its name in the folder or data set.")
  url: str = Field(description="Where this server has the picture.")


class Scored(Result):
  score: float = Field(description="Cosine.")


class Hit(Scored):
  precision: float | None = Field(description="Of everything from this score on; null: unknown.")


class Answer(BaseModel):
  query: str
  threshold: float
  relevant: bool
  best_score: float
  results: list[Hit]
  near_misses: list[Hit] = Field(
    description="The best of those below the threshold; none if there are `top` results or more."
  )


class Caption(BaseModel):
  caption: str
  score: float
  precision: float | None


class Similar(BaseModel):
  image: Result
  images: list[Scored]
  captions: list[Caption]


class Thresholds(BaseModel):
  measured_on: str
  relevance: str
  default: float = Field(description="The precision at the best F1.")
  threshold: list[float]
  precision: list[float]
  recall: list[float]
  returned: list[int]


class About(BaseModel):
  images: int
  captions: int
  generation: str
  step: int | None
  thresholds: Thresholds | None
  examples: list[str]
  limits: dict[str, int]
