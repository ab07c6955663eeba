"""Request and response bodies of the API, as in its OpenAPI description."""

import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from xe_retrieval.search import conditions
from xe_retrieval.serving.limits import LIMITS

Text = Annotated[str, StringConstraints(min_length=1, max_length=LIMITS["query"], pattern=r"\S")]
Id = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]
# Years beyond these have no room in a file's time.
Date = Annotated[datetime.date, Field(ge=datetime.date(1900, 1, 1), le=datetime.date(2200, 1, 1))]


class Error(BaseModel):
  detail: str = Field(description="One sentence.")


class Where(BaseModel):
  """Which images are searched."""

  model_config = ConfigDict(extra="forbid")
  folder: str = Field(
    "", max_length=1_000, description="Only this source or folder, as /api/about lists them."
  )
  filter: str = Field(
    "",
    max_length=conditions.LONGEST,
    description='Only images that match, as in source == "holiday" and year > 2020: == != < <= > '
    '>=, in [a, b], like "a%", and, or, not, parentheses; /api/about lists columns.',
  )
  since: Date | None = Field(None, description="Only images changed on this day or later.")
  until: Date | None = Field(None, description="Only images changed on this day or before.")


class Options(Where):
  """Which results: at most one of the four minima and maxima, then which part of these."""

  min_probability: float | None = Field(
    None,
    ge=0,
    le=1,
    allow_inf_nan=False,
    description="Minimum probability of each result; 0.5 if nothing else is asked for.",
  )
  max_wrong: float | None = Field(
    None,
    ge=0,
    allow_inf_nan=False,
    description="Irrelevant results per query, at most, in the mean.",
  )
  min_precision: float | None = Field(
    None,
    ge=0,
    le=1,
    allow_inf_nan=False,
    description="Minimum precision of all results of many queries.",
  )
  threshold: float | None = Field(
    None, ge=-1, le=1, allow_inf_nan=False, description="Minimum score of the results."
  )
  guarantee: bool = Field(
    False, description="The lower bound of the precision must reach min_precision."
  )
  order: Literal["best", "date"] = Field("best", description="date: the newest results first.")


class Paged(Options):
  top: int = Field(20, ge=1, le=LIMITS["top"], description="Maximum number of results.")
  offset: int = Field(
    0, ge=0, le=LIMITS["offset"], description="Skips so many results: the pages before."
  )
  near: int = Field(0, ge=0, le=LIMITS["top"], description="Maximum number of near misses.")
  levels: bool = Field(
    False, description="Also how many images reach each percent; compares with every image."
  )


_WEIGHT = Field(
  0.5, ge=0, le=1, allow_inf_nan=False, description="Of the words, where there is a picture too."
)
_Q = Field(None, description="Text to search for.")
_LIKE = Field(
  None, description="Picture to search for: id of an image, or what POST /api/search answered."
)


class Search(Paged):
  q: Text | None = _Q
  like: Id | None = _LIKE
  weight: float = _WEIGHT


class Upload(Paged):
  """Beside a picture as the body."""

  q: Text | None = _Q
  weight: float = _WEIGHT


class Export(Options):
  q: Text | None = _Q
  like: Id | None = _LIKE
  weight: float = _WEIGHT
  top: int = Field(LIMITS["export"], ge=1, le=LIMITS["export"], description="Rows at most.")
  format: Literal["csv", "json", "txt"] = Field("csv", description="txt: paths, one per line.")


class Batch(Paged):
  """Several queries with the same options."""

  model_config = ConfigDict(extra="forbid", strict=True)
  queries: list[Text] = Field(min_length=1, max_length=LIMITS["batch"])


class Result(BaseModel):
  id: str
  image: str = Field(description="File name in the folder, or record in the data set.")
  url: str = Field(description="Address of the thumbnail on this server.")
  folder: str = Field(description="Source, and the folder in it.")
  date: str | None = Field(description="Day on which the file was changed; null: not known.")


class Scored(Result):
  score: float = Field(description="Cosine.")


class Hit(Scored):
  probability: float | None = Field(
    description="That the image is relevant to the words in this collection; null: not evaluated, "
    "or there are no words."
  )
  likeness: float | None = Field(description="Cosine to the picture; null: there is none.")


class Expect(BaseModel):
  """What a cut gives in a collection of this size, in the mean over queries."""

  precision: float | None = Field(description="Null: measured on too few pairs.")
  precision_at_least: float | None = Field(description="Lower bound with 90 % confidence.")
  recall: float
  results_per_query: float
  wrong_per_query: float


class Levels(BaseModel):
  """Of this very query, for every whole percent from 1 to 99."""

  results: list[int] = Field(description="Images with at least this probability.")
  wrong: list[float] = Field(description="How many of these are expected to be irrelevant.")


class Answer(BaseModel):
  query: str | None = Field(description="Null: a picture alone.")
  relevant: bool = Field(description="Whether there are results.")
  total: int | None = Field(
    description="Results in all; null: at least as many as asked for, the index is approximate and "
    "`levels` were not."
  )
  words: bool = Field(
    description="Whether the query is a few known words, which has another meaning than a caption."
  )
  familiar: bool = Field(description="False: unlike the captions the model was trained on.")
  suggestions: list[str] = Field(description="Training captions nearest to an unfamiliar query.")
  threshold: float | None = Field(
    description="Score that this query's results need; null: what is asked for cannot be reached."
  )
  best_score: float | None = Field(
    description="Null: no image is in this folder, of these dates and passes the filter."
  )
  best_probability: float | None
  expect: Expect | None
  like: str | None = Field(description="Id of the picture, for further requests.")
  levels: Levels | None = Field(description="If asked for, and if the model was evaluated.")
  generation: str = Field(description="Of the index.")
  version: str = Field(description="Of /api/about: ask for it again when this has changed.")
  results: list[Hit]
  near_misses: list[Hit] = Field(
    description="The best images below the threshold; none if there are `top` results or more."
  )


class Rerank(Where):
  q: Text = Field(description="Text to search for.")


class Place(BaseModel):
  id: str
  score: float = Field(description="First stage and joint logit, in the unit of the first stage.")
  probability: float = Field(description="That the image is relevant, by both stages.")


class Reranked(BaseModel):
  """The first candidates of /api/search, read by a joint encoder: best first."""

  query: str
  results: list[Place]
  generation: str = Field(description="Of the index.")


class Curve(BaseModel):
  """How many images have at least each score."""

  query: str
  scores: list[float]
  images: list[int]
  thresholds: list[float] | None = Field(
    description="Score that each whole percent of probability needs; null: not evaluated."
  )
  others: list[list[int]] = Field(description="The same of captions that the model knows.")
  images_in_all: int


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


class FolderSize(BaseModel):
  folder: str
  images: int


class Column(BaseModel):
  column: str
  type: Literal["text", "whole", "number", "date"]


class Audit(BaseModel):
  """How well the index is searched, by queries in words."""

  recall_at_10: float = Field(description="Share of the true ten nearest that are found.")
  queries: int = Field(description="0: every image is compared with, which finds all of them.")
  asked: str


class About(BaseModel):
  images: int
  captions: int
  generation: str
  step: int | None
  scores: str = Field(description="What scores are: cosines, or how a bank corrects them.")
  calibration: Calibration | None = Field(description="Null: the model was not evaluated.")
  examples: list[str]
  folders: list[FolderSize] = Field(description="Sources and their folders, 500 at most.")
  dates: list[str] | None = Field(description="First and last day; null: not known.")
  columns: list[Column] = Field(description="What a filter may name.")
  rerank: int | None = Field(description="Candidates that /api/rerank reads; null: it is off.")
  audit: Audit | None = Field(description="Null: no captions were known to ask for.")
  limits: dict[str, int]
  version: str = Field(description="Of all this; answers to searches have it too.")
