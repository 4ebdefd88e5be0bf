"""Texts that speculative decoding is measured on: the prompt has all of the reply, some, or nothing.

Prompts of `copy` and `json` are raw text with examples, which small models follow better than orders.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pagelet.models.errors import InputError
from pagelet.runtime import SamplingParams
from pagelet.runtime.prompts import Prompt

NAMES = ("copy", "json", "news", "chat", "rewrite")

_COPY_TOKENS = 150
_JSON_TOKENS = 100
_NEWS_TOKENS = 128
_CHAT_TOKENS = 128
_REWRITE_TOKENS = 160
_NEWS_WORDS = 150  # about 200 tokens
_NEWS_PROMPTS = 6
_ANCHOR_WORDS = 4  # of a passage, which stand under it once more


@dataclass(frozen=True)
class Task:
    """A prompt and how many tokens follow it, whatever the model says of the end.

    Attributes:
        answer: the reply to hope for, or more than that; None: there is none.
    """

    prompt: Prompt
    new_tokens: int
    answer: str | None = None

    def is_answered(self, text: str) -> bool | None:
        """Whether `text` is the answer, as far as both go; None: there is none to hope for."""
        if self.answer is None:
            return None
        return text.startswith(self.answer) or self.answer.startswith(text)


@dataclass(frozen=True)
class Workload:
    """Tasks of one kind.

    Attributes:
        temperature: 0 is greedy; otherwise the seed is fixed.
        is_evidence: False: small models fall into loops here, which guesses hit without being useful.
    """

    name: str
    tasks: tuple[Task, ...]
    temperature: float = 0.0
    is_evidence: bool = True

    def params(self, task: Task) -> SamplingParams:
        return SamplingParams(
            max_tokens=task.new_tokens, temperature=self.temperature, seed=0, ignore_eos=True
        )


def load(names: Sequence[str], news: str = "") -> list[Workload]:
    """The workloads of these names, in their order; `news` is a text with one article per line.

    Raises:
        InputError: no name, an unknown one, one that is there twice, or no article that is long enough.
    """
    if not names:
        raise InputError(f"--workloads is empty; known: {', '.join(NAMES)}.")
    if unknown := set(names) - set(NAMES):
        raise InputError(f"--workloads has {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}.")
    if len(set(names)) < len(names):
        raise InputError(f"--workloads names one twice: {', '.join(names)}.")
    return [_load(name, news) for name in names]


def _load(name: str, news: str) -> Workload:
    if name == "copy":
        return Workload(name, tuple(_copy(passage) for passage in PASSAGES))
    if name == "json":
        return Workload(name, tuple(_json(asked, shots) for asked, shots in _JSON_SHOTS))
    if name == "news":
        return Workload(name, _news(news))
    if name == "chat":
        return Workload(name, tuple(_chat(question, _CHAT_TOKENS) for question in QUESTIONS), temperature=1)
    order = "Rewrite this paragraph in simpler words:\n\n"
    tasks = tuple(_chat(order + passage, _REWRITE_TOKENS) for passage in PASSAGES)
    return Workload(name, tasks, is_evidence=False)


def _copy(passage: str) -> Task:
    """Ask for the passage word for word; it is longer than what is generated."""
    words = passage.split(" ")
    start, rest = (" ".join(part) for part in (words[:_ANCHOR_WORDS], words[_ANCHOR_WORDS:]))
    return Task(f"Original:\n{passage}\n\nQuoted in full:\n{start}", _COPY_TOKENS, " " + rest)


def _json(asked: int, shots: tuple[int, ...]) -> Task:
    examples = "".join(f"{_card(PLACES[shot])} {json.dumps(PLACES[shot])}\n\n" for shot in shots)
    return Task(examples + _card(PLACES[asked]), _JSON_TOKENS, " " + json.dumps(PLACES[asked]))


def _card(place: dict[str, str]) -> str:
    return (
        "Text: {name}\n{address}\nPhone: {phone}\nEmail: {email}\nOpens: {opens}\nCloses: {closes}\n"
        "Closed on: {closed_on}\n{note}\nJSON:"
    ).format(**place)


def _news(text: str) -> tuple[Task, ...]:
    """The beginnings of the first articles that are longer than that."""
    articles = [line.split() for line in text.splitlines()]
    long = [words[:_NEWS_WORDS] for words in articles if len(words) > _NEWS_WORDS]
    if not long:
        raise InputError(
            f"no line of the news has more than {_NEWS_WORDS} words; give --news a text with one article "
            "per line, or leave news out of --workloads."
        )
    return tuple(Task(" ".join(words), _NEWS_TOKENS) for words in long[:_NEWS_PROMPTS])


def _chat(text: str, new_tokens: int) -> Task:
    return Task([{"role": "user", "content": text}], new_tokens)


QUESTIONS = (
    "What should I pack for a week of walking in the mountains?",
    "Tell me a story about a fisherman who is afraid of the sea.",
    "Why do leaves change their colour in autumn?",
    "How do I ask my neighbour to turn the music down without starting a quarrel?",
    "Give me three ideas for a birthday party in a small flat.",
    "Explain to a child how a bicycle stays upright.",
)

PASSAGES = tuple(
    " ".join(passage.split())
    for passage in (
        """
        The upper lock at Wendle Bridge holds two narrow boats side by side, or a single barge of up
        to twenty metres. Boats that come upstream wait at the green post until the keeper shows a
        white flag. The lower gates are then shut behind them, the paddles are raised a quarter at a
        time, and in about eleven minutes the chamber fills to the level of the pound above. Ropes
        must be held by hand and never tied, because a boat that is tied when the water falls hangs by
        its own rope and may tip over. From the first of November to the end of February the lock
        opens only at nine, noon and three. In times of drought the keeper may hold single boats for
        up to forty minutes, so that two can share one filling of the chamber. Complaints go to the
        office in Marlow Street, not to the keeper.
        """,
        """
        Weigh five hundred grams of strong flour into a wide bowl and stir in ten grams of salt.
        Dissolve six grams of dried yeast in three hundred and forty grams of lukewarm water, pour it
        over the flour, and mix with one hand until no dry patches are left. Cover the bowl and leave
        it alone for twenty minutes. Then fold the dough over itself eight times, turning the bowl a
        little after each fold, and let it rise for an hour and a half in a warm corner of the
        kitchen. Shape it into a ball on a floured board, set it seam side down on baking paper, and
        cut a cross into the top with a sharp knife. Bake it in a heavy pot with the lid on for thirty
        minutes at two hundred and thirty degrees, then without the lid for another fifteen, until the
        crust is a deep brown and the loaf sounds hollow when you knock on it.
        """,
        """
        When the town hall clock stopped at ten past four on a Tuesday in March, nobody climbed the
        tower for three days. The baker noticed first, because he takes his second tray out of the
        oven when it strikes six. On Friday the mayor sent for Agnes Pell, who had looked after the
        clock with her father and still kept his keys in a biscuit tin. She found that the weight had
        come to rest on a stack of old election posters which someone had stored at the bottom of the
        shaft. With the posters gone, the weight had another two metres to fall, and the clock began
        to tick before she had put down her lamp. She set the hands by her own watch, oiled the
        escapement, and wrote the date in pencil on the wall, below the forty other dates. The council
        paid her eighteen pounds and kept the posters.
        """,
        """
        A worker bee changes her trade as she grows older. For the first three days she cleans the
        cells in which the queen will lay. From the fourth day to the eleventh she feeds the larvae,
        first the old ones with pollen and honey, then the young ones with a jelly that she makes
        herself. After that she builds comb, packs pollen, and fans the nectar with her wings until it
        is thick enough to keep. For a few days she may stand guard at the entrance, where she smells
        everyone who wants to come in. Only in her last two or three weeks does she leave the hive to
        gather nectar, pollen, water and resin. A forager visits between fifty and a hundred flowers
        on one trip and makes about ten trips a day. In all her life she brings home enough nectar for
        a twelfth of a teaspoon of honey.
        """,
        """
        The allotment committee met on 14 May in the reading room; nine members were present and two
        had sent apologies. The treasurer reported a balance of £1,284.60, of which £300 is set aside
        for the new water tank. Mrs Okafor asked why plot 27 had been empty since January. The
        secretary answered that the tenant was ill and had asked for the plot to be kept until the
        autumn; this was agreed by seven votes to two. Mr Lindqvist offered to repair the north gate
        if the society buys the timber, and his offer was accepted with thanks. Bonfires will be
        allowed on the last Saturday of each month, after six in the evening, and only while the wind
        is below fifteen miles an hour. The plant sale takes place on 2 June from ten until one. The
        next meeting was fixed for 11 July at half past seven.
        """,
        """
        Dear Mr Hallam, thank you for your letter of 3 September about the piano in the upstairs room.
        It was built in Leeds in 1911 and has belonged to the choir since 1968, when Miss Trent left
        it to us in her will. Two of the lower strings are missing, the middle pedal has never worked,
        and the lid does not close in wet weather. All the same it keeps its tune well, and our
        accompanist is fond of it. We should be glad to lend it to the school until Easter if you can
        find four strong people to carry it down the stairs. The insurance, which costs £46 a year,
        would have to be paid by you. Please let me know by the end of the month, as the tuner comes
        on 5 October and will want to know which house to visit. Yours sincerely, Helen Marsh,
        secretary of the Ashby Choral Society.
        """,
        """
        The cave at Durrow Point was found in 1874 by a shepherd who was looking for a lost dog. Its
        mouth is so low that visitors must stoop for the first nine metres, but beyond the second bend
        the roof rises to the height of a church. On the left a stream comes out of the rock, crosses
        the floor in a channel worn as deep as a man's arm, and vanishes again behind a curtain of
        pale stone. The air is the same in every season, eleven degrees and damp enough to wet a coat.
        Bats sleep in the northern gallery from October to April, and that part is closed to everyone
        while they are there. The names which soldiers scratched into the wall in 1916 are kept behind
        glass. Tours begin every forty minutes, take about half an hour, and are led by students who
        know where the dog was found, which is the question that is asked most often.
        """,
    )
)

_KEYS = ("name", "address", "phone", "email", "opens", "closes", "closed_on", "note")
PLACES = tuple(
    dict(zip(_KEYS, values, strict=True))
    for values in (
        (
            "The Copper Kettle",
            "14 Harbour Lane, Whitby",
            "01947 555 210",
            "tea@copperkettle.example",
            "10:15",
            "16:45",
            "Monday",
            "Dogs are welcome in the garden, and the scones are baked twice a day.",
        ),
        (
            "Abbey Street Books",
            "62 Abbey Street, Leeds",
            "0113 555 0846",
            "books@abbeystreet.example",
            "10:00",
            "18:00",
            "Sunday",
            "Old maps are kept upstairs and shown on request.",
        ),
        (
            "Poplar Bicycles",
            "27 Poplar Avenue, Cork",
            "021 555 7319",
            "ride@poplarbikes.example",
            "08:30",
            "16:45",
            "Tuesday",
            "Small repairs are done while you wait, and tea is served in the yard.",
        ),
        (
            "Castle Hill Clocks",
            "45 Castle Hill, Exeter",
            "01392 555 608",
            "anton@castleclocks.example",
            "09:30",
            "17:00",
            "Saturday",
            "Pocket watches are cleaned within a week unless a part has to be made.",
        ),
        (
            "Quayside Prints",
            "118 Quay Side, Bristol",
            "0117 555 3902",
            "studio@quaysideprints.example",
            "10:30",
            "18:45",
            "Friday",
            "Visitors may try the old hand press on the first weekend of the month.",
        ),
        (
            "Fenland Bakery",
            "9 Mill Road, Cambridge",
            "01223 555 174",
            "bread@fenland.example",
            "07:45",
            "14:00",
            "Thursday",
            "Rye loaves must be ordered by noon on the day before.",
        ),
        (
            "The Lantern House",
            "70 Orchard Close, Galway",
            "091 555 8263",
            "light@lanternhouse.example",
            "12:00",
            "20:30",
            "Monday",
            "Paper lanterns can be painted by children at the long table by the window.",
        ),
    )
)
# The place that is asked for, and the examples before it.
_JSON_SHOTS = ((0, (2, 3)), (1, (4, 0)), (2, (4, 0)), (3, (6, 2)), (4, (1, 3)), (5, (2, 3)), (6, (0, 1)))
