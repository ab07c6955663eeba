"""How often queries that no image answers are told that nothing is relevant, and what that costs.

  python -m benchmarks.nothing_relevant [WORKDIR …] [--other=captions/coco:test]

Each evaluated model searches the images of its data set's test split for
  random    500 queries of one to four made-up or randomly chosen English words
  foreign   40 sentences in ten other languages
  far-off   64 queries about what photos of daily life or drawn scenes do not show
  other     500 captions of another data set, where --other names one; some may fit
  absent    500 test captions while their own image is not in the collection; others may still be
            relevant, so this one is for information
and is asked at the default cut (probability 0.5), and at the log-odds that return a stated share of
the test captions' own images, with and without what is known of the query beside its scores: its
familiarity, its words, and whether it is a few words that the model knows. `cost` is the share of
test captions that lose all of their results to the familiarity, `rare` the same among those with a
word that no training caption has.
"""

import argparse
import dataclasses
import random

import numpy as np

from xe_retrieval.calibration import run as runs
from xe_retrieval.data import pipeline

RUNS = ("sampled_softmax", "cross_example_softmax")
RECALLS = (0.5, 0.7)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  default = [f"runs/quickstart/{name}" for name in RUNS]
  parser.add_argument("workdirs", nargs="*", default=default)
  parser.add_argument("--other", default="", help="DATASET:SPLIT")
  args = parser.parse_args()
  names = (*SETS, *(["other"] if args.other else []), "absent", "cost", "rare")
  print(f"{'refused (%)':58}{'cut':>26}" + "".join(f"{n:>9}" for n in names))
  for workdir in args.workdirs:
    name = "/".join(workdir.rstrip("/").split("/")[-2:])
    for cut, told in measure(workdir, args.other):
      print(f"{name:58}{cut:>26}" + "".join(f"{100 * x:9.1f}" for x in told), flush=True)


def measure(workdir, other=""):
  """Yields (name of the cut, share refused of each set, and the costs)."""
  run = runs.Run(workdir)
  calibration = run.calibration()
  pairs = run.correct(run.embed("", "test")[0])
  shown = Shown(calibration, len(pairs.image))
  scores = pairs.text @ pairs.image.T  # [Q, M]
  own = scores[np.arange(len(scores)), pairs.image_of_text]
  absent = scores[:500].copy()
  absent[np.arange(len(absent)), pairs.image_of_text[:500]] = -9
  known = shown.of(pairs.captions, pairs.text, pairs.features)
  asked = {}  # name -> best score of each query, what is known of it
  sets = SETS | ({"other": _captions(run, *other.rsplit(":", 1), 500)} if other else {})
  for name, queries in sets.items():
    tower = run.encoder.text_features(queries)
    text = run.scoring.text(run.encoder.project_text(tower), tower)
    asked[name] = (text @ pairs.image.T).max(axis=1), shown.of(queries, text, tower)
  some = (part[:500] for part in (pairs.captions, pairs.text, pairs.features))
  asked["absent"] = absent.max(axis=1), shown.of(*some)
  best = scores.max(axis=1)
  words = set(" ".join(_captions(run, run.config.data.name, "train")).lower().split())
  rare = np.array([not words.issuperset(c.lower().split()) for c in pairs.captions])

  for familiar in (False, True):
    cuts = {"probability 0.5": 0.5}
    for recall in RECALLS:
      cuts[f"recall {recall}"] = np.quantile(shown(own, known, familiar), 1 - recall)
    for name, cut in cuts.items():
      told = [np.mean(shown(*one, familiar) < cut) for one in asked.values()]
      lost = (shown(best, known, False) >= cut) & (shown(best, known, True) < cut)
      costs = [lost.mean(), lost[rare].mean() if rare.any() else np.nan] if familiar else [0, 0]
      yield name + (" + familiar" if familiar else ""), [*told, *costs]


class Shown:
  """The probability beside a result, as search shows it, or without what is known of the query."""

  def __init__(self, calibration, images):
    self.calibration, self.images = calibration, images
    self.captions = calibration.best.at(images)
    without = dataclasses.replace(self.captions.calibrator, familiar=np.array([]))
    self.without = dataclasses.replace(self.captions, calibrator=without)

  def of(self, queries, text, features):
    """What is known of queries: as captions, which of them are a few words, and as these."""
    calibration = self.calibration
    words = [q for q, query in enumerate(queries) if calibration.are_words(query)]
    asked = [queries[q] for q in words]
    few = calibration.vocabulary.describe(asked, text[words]) if words else None
    return calibration.queries(queries, text, features), words, few

  def __call__(self, score, known, familiar):
    described, words, few = known
    shown = self._probability(self.captions if familiar else self.without, score, described)
    if familiar and words:
      meaning = self.calibration.words.at(self.images)
      shown[words] = self._probability(meaning, score[words], few)
    return shown

  def _probability(self, meaning, score, described):
    return meaning.probability(
      meaning.calibrator.logit(score[:, None], described)[:, 0], self.images
    )


def _captions(run, name, split, count=None):
  """Captions of a split, all or evenly chosen ones."""
  source = pipeline.Source(name, run.config.data.dir, split)
  found = [caption for record in source.captions() for caption in record]
  return found if count is None else found[:: max(len(found) // count, 1)][:count]


def _random_queries(count=500):
  """Half of made-up words, half of English words that mean nothing together."""
  draw, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
  made_up = lambda: "".join(draw.choices(letters, k=draw.randint(3, 9)))  # noqa: E731
  out = []
  for i in range(count):
    word = made_up if i % 2 else lambda: draw.choice(_WORDS)
    out.append(" ".join(word() for _ in range(draw.randint(1, 4))))
  return out


_WORDS = """\
abstract account alliance amendment annual appendix arbitrage asset audit bandwidth bishop bond
budget bureau calculus capital clause coalition compiler consensus coupon credit currency debt
decree deduction democracy deposit dialect dividend doctrine elasticity embargo entropy equation
equity ethics exponent export faculty footnote forecast franchise fraud gradient grammar grant
guild hypothesis idiom import inflation injunction integral interest invoice jargon judge kernel
ledger lemma liability liquidity logic loophole manifesto margin matrix merger metaphor mortgage
motive nihilism notation nuance oath obligation opinion paradox patent payroll pension phoneme
policy premium preface prologue proof protocol quorum quota ratio rebate referendum refund
regime remedy royalty rumour sanction semantics stanza statute subsidy surplus syllable syntax
tariff tax tenure theorem thesis tribunal verdict veto voucher vowel warranty yield""".split()  # noqa: SIM905 a list of quoted words would fill a page

_FOREIGN = """\
un chien court dans l'herbe|deux enfants jouent au ballon|une voiture rouge|le chat dort
ein hund läuft über die wiese|zwei kinder spielen ball|ein rotes auto|die katze schläft
un perro corre por la hierba|dos niños juegan a la pelota|un coche rojo|el gato duerme
un cane corre nell'erba|due bambini giocano a palla|una macchina rossa|il gatto dorme
um cachorro corre na grama|duas crianças brincam com bola|um carro vermelho|o gato dorme
een hond rent door het gras|twee kinderen spelen met een bal|een rode auto|de kat slaapt
pies biegnie po trawie|dwoje dzieci gra w piłkę|czerwony samochód|kot śpi
собака бежит по траве|двое детей играют в мяч|красная машина|кошка спит
犬が草の上を走る|二人の子供がボールで遊ぶ|赤い車|猫が寝ている
一只狗在草地上奔跑|两个孩子在玩球|一辆红色的汽车|猫在睡觉""".replace("\n", "|").split("|")

_FAR = """\
quarterly report|error 404 page not found|how to bake bread|stock market crash of 1929
the meaning of life|invoice 2024|president of france|terms and conditions|privacy policy
reset my password|proof of fermat's last theorem|weather forecast for tomorrow|tax return
def main(): print(x)|select * from users|import numpy as np|http 500 internal server error
lorem ipsum dolor sit amet|asdf qwer zxcv|aaaaaaaa|!!!???|0123456789|e = mc squared
the french revolution|quantum chromodynamics|supply and demand|annual general meeting
minutes of the last meeting|curriculum vitae|bank statement|exchange rate euro dollar
interest rates rise again|unemployment figures|parliamentary election results|supreme court ruling
definition of entropy|synonyms of happy|past tense of go|translate this sentence|seven times eight
square root of two|boiling point of water|atomic number of carbon|speed of light in vacuum
dna replication|photosynthesis equation|plate tectonics theory|big bang cosmology|dark matter
opening hours|phone number of the pharmacy|cancel my subscription|track my parcel|promo code
software licence agreement|version 2.0 release notes|null pointer exception|segmentation fault
out of memory|merge conflict in main|unit test failed|deploy to production|rate limit exceeded
two factor authentication|end of file""".replace("\n", "|").split("|")

SETS = {"random": _random_queries(), "foreign": _FOREIGN, "far-off": _FAR}


if __name__ == "__main__":
  main()
