"""Chat prompts made from topics and instructions, so that a model writes about many things in many ways.

Three parts that share nothing: prompts to train on; held-out ones, of the same making about other topics and
partly of other instructions; and questions that nobody made from templates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

_TOPICS = """
photosynthesis; the water cycle; black holes; plate tectonics; vaccines; the human heart; antibiotics
DNA; gravity; the periodic table; acids and bases; electric motors; batteries; solar panels
nuclear fission; sound waves; lightning; climate change; recycling; bees; sharks; migrating birds
the life of a butterfly; dinosaurs; coral reefs; rainforests; deserts; volcanoes; earthquakes; rivers
mountains; the moon; Mars; comets; telescopes; satellites; the Roman Empire; ancient Egypt
the Silk Road; the French Revolution; the Industrial Revolution; the Second World War; the Cold War
the printing press; the space race; the Olympic Games; the history of writing; Leonardo da Vinci
Marie Curie; Isaac Newton; Ada Lovelace; Mozart; Shakespeare; impressionist painting; jazz; film music
photography; architecture; poetry; ballet; street art; pottery; chess; football; tennis; swimming
running a marathon; yoga; cycling; hiking; camping; gardening; growing tomatoes; houseplants; composting
baking bread; pasta; making soup; coffee; tea; cheese; vegetarian cooking; a healthy breakfast
packing a lunch; knives in the kitchen; saving money; a household budget; credit cards; interest rates
inflation; the stock market; insurance; taxes; starting a small business; marketing; customer service
job interviews; writing a resume; meetings; remote work; time management; negotiation; leadership
teamwork; giving feedback; public speaking; learning a language; studying for exams; note taking
reading habits; teaching children to read; homework; kindergarten; universities; libraries; museums
moving to a new city; Paris; Tokyo; New York; Kenya; Brazil; Iceland; train travel; airports
packing a suitcase; travelling with children; road safety; electric cars; bicycles in cities; bridges
ships; airplanes; elevators; washing machines; refrigerators; clocks; glass; paper; steel; plastics
cotton; wood; sleep; stress; headaches; allergies; the common cold; dental care; vitamins; sugar
drinking water; exercise for older people; first aid; mindfulness; friendship; raising a puppy; cats
horses; aquariums; neighbours; weddings; birthdays; holidays; gift giving; good manners; democracy
elections; human rights; the United Nations; courts of law; privacy; copyright; artificial intelligence
machine learning; computer viruses; passwords; the internet; web browsers; email; databases
spreadsheets; programming for beginners; Python; JavaScript; version control; testing software
sorting algorithms; recursion; binary numbers; cloud computing; smartphones; video games; robots
3D printing; virtual reality; prime numbers; fractions; probability; statistics; geometry; percentages
logic puzzles; philosophy; ethics; happiness; creativity; curiosity; memory; dreams; emotions; honesty
"""
_HELD_OUT_TOPICS = """
tides; the immune system; magnets; whales; glaciers; the Great Wall of China; the Renaissance
Albert Einstein; opera; basketball; painting a room; growing herbs; rice; a picnic; mortgages
donating to charity; a difficult colleague; learning the piano; Barcelona; a weekend in the mountains
lighthouses; concrete; back pain; parrots; moving house; journalism; encryption; operating systems; SQL
graphs in mathematics; patience; renewable energy
"""
_KINDS = (
    "Explain {topic} in simple terms.",
    "Explain {topic} to a ten-year-old.",
    "What should everyone know about {topic}?",
    "Tell me about {topic}.",
    "Can you tell me something surprising about {topic}?",
    "Give me five facts about {topic}.",
    "List three advantages and three disadvantages of {topic}.",
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write a paragraph about {topic}.",
    "Write an introduction for an essay about {topic}.",
    "Write a short email to a colleague about {topic}.",
    "Write a dialogue between two friends who talk about {topic}.",
    "Write a blog post about {topic} with a title and headings.",
    "Write a social media post about {topic}.",
    "Write three quiz questions about {topic} and give the answers.",
    "Summarize the most important ideas about {topic} in three sentences.",
    "Give me a step-by-step guide for somebody who is new to {topic}.",
    "What are common mistakes or misunderstandings about {topic}?",
    "What is the history of {topic}?",
    "Why does {topic} matter?",
    "How has {topic} changed over time?",
    "What are the main parts of {topic}? Answer as a bulleted list.",
    "Make a table with examples that have to do with {topic}.",
    "Suggest ten titles for an article about {topic}.",
    "Compare {topic} with {other}.",
    "What do {topic} and {other} have in common?",
    "I have to give a talk about {topic}. Help me with an outline.",
    "I do not understand {topic}. Where do I begin?",
    "What are good questions to ask an expert on {topic}?",
    "Name some books or people that are important for {topic}, and say why.",
    "Is {topic} good or bad? Give your opinion.",
    "Write a Python class that models {topic}.",
    "Write a Python function that has to do with {topic} and explain it.",
    "Write a JSON object that describes {topic}.",
    "Plan a lesson about {topic} for a school class.",
    "Imagine you are a journalist. Report on {topic}.",
    "Invent a character whose life is about {topic}.",
    "Give me advice about {topic}.",
    "Describe {topic} in one sentence, then in more detail.",
)
_HELD_OUT_KINDS = (
    "What are the pros and cons of {topic}?",
    "Write a letter to the editor about {topic}.",
    "How would you describe {topic} to somebody from another century?",
    "Give me a short definition of {topic} and an example.",
    "What problems come up with {topic}, and how are they solved?",
)
_TASKS = (
    "Write a Python function that {task}.",
    "Write a JavaScript function that {task}.",
    "How do I write a program that {task}?",
    "Write a Python function that {task}, with a docstring and an example.",
)
_WORK = """
reverses a string; checks whether a number is prime; counts the words of a text
finds the largest number of a list; sorts a list of names; removes duplicates from a list
computes the factorial of a number; merges two sorted lists; reads a CSV file
converts Celsius to Fahrenheit; finds the most common letter of a text; checks for a palindrome
computes the mean and median; searches a sorted list; prints the Fibonacci numbers; adds two matrices
parses a date; generates a random password; flattens a nested list; groups people by age
downloads a web page; counts vowels
"""
_HELD_OUT_WORK = (
    "sums the digits of a number; finds the second largest number of a list; turns a text into title case"
)
_SENTENCES = """
The meeting on Monday was moved to Wednesday because two of the speakers were ill.
Our new shop opens on Saturday at nine, and the first hundred customers get a free cup of coffee.
The old bridge was closed for repairs, so the children had to walk an hour longer to school.
Although the experiment failed twice, the team learned enough to build a better sensor.
The hotel room was clean and quiet, but the breakfast was cold and the staff were not friendly.
She bought the bicycle from a neighbour, repaired the brakes and rode it to work every day.
The company sold fewer phones this year, while its income from services grew by a fifth.
When the storm was over, the fishermen found their boats in the middle of the market square.
"""
_HELD_OUT_SENTENCES = """
The library will stay open until ten in the evening during the weeks before the exams.
He forgot his keys, climbed through the window and was greeted by a very surprised policeman.
"""
_EDITS = (
    "Rewrite this in a formal style: {text}",
    "Rewrite this so that a child understands it: {text}",
    "Make this shorter: {text}",
    "Say this in other words: {text}",
    "Translate into French: {text}",
    "Translate into Spanish: {text}",
    "Is the following text positive, negative or neutral? Explain. {text}",
    "Continue this story: {text}",
    "Who did what in this text? Answer with a list. {text}",
    "Write a headline for this: {text}",
    "Answer with three questions about this text: {text}",
)
_QUESTIONS = """
Why is the sky blue?
Give me five ideas for a birthday party in a small flat.
Explain what a hash table is to somebody who knows how to use a dictionary.
Write a short letter to a neighbour about a noisy dog.
What is the capital of Australia, and why is it not Sydney?
My code says "index out of range". What does that mean?
How many hours should a teenager sleep?
Can I freeze cooked rice?
What is the difference between a virus and a bacterium?
Help me to say no to an invitation without being rude.
Which is heavier, a kilogram of feathers or a kilogram of iron?
Tell me a joke about computers.
How do I remove a red wine stain from a carpet?
Write a haiku about the first snow.
What happened in 1989 in Berlin?
I feel tired all the time. What could I change?
Draft a product description for a wooden lamp.
How does a bill become a law in the United States?
What is 17 times 24? Show your work.
Write a SQL query that finds the ten customers who spent the most.
Recommend a route for two days in Rome.
What should I cook with eggs, potatoes and an onion?
Describe the plot of Romeo and Juliet.
Give me three exercises for a stiff neck.
"""


class TextError(Exception):
    """A file holds other texts than those that are wanted, or the model could not write them."""


class Part(Enum):
    """What a prompt is for."""

    TRAINING = "training"
    HELD_OUT = "held_out"  # made alike, of topics and instructions of their own
    QUESTIONS = "questions"  # not made from templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a user says first in a chat."""

    text: str
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stock:
    """What prompts of a part are made of."""

    topics: Sequence[str]
    kinds: Sequence[str]
    work: Sequence[str]
    sentences: Sequence[str]


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` different prompts, every tenth of them held out, and behind them the questions.

    The same for the same arguments. Raises ValueError when `count` is below 1 or above what there is.
    """
    if count < 1:
        raise ValueError(f"{count} prompts are asked for: it must be at least 1")
    draw = random.Random(seed)
    training = _Stock(
        topics=_list(_TOPICS), kinds=_KINDS, work=_list(_WORK), sentences=_SENTENCES.strip().splitlines()
    )
    held_out = _Stock(
        topics=_list(_HELD_OUT_TOPICS),
        kinds=_KINDS + _HELD_OUT_KINDS,
        work=_list(_HELD_OUT_WORK),
        sentences=_HELD_OUT_SENTENCES.strip().splitlines(),
    )
    made: dict[str, Part] = {}
    tries_left = 100 * count
    while len(made) < count:
        if tries_left == 0:
            raise ValueError(f"{count} prompts are asked for: there are about {len(made)} different ones")
        tries_left -= 1
        is_held_out = len(made) % 10 == 9
        stock, part = (held_out, Part.HELD_OUT) if is_held_out else (training, Part.TRAINING)
        made.setdefault(_make(stock, draw), part)
    prompts = [Prompt(text=text, part=part) for text, part in made.items()]
    return prompts + [Prompt(text=text, part=Part.QUESTIONS) for text in _QUESTIONS.strip().splitlines()]


def _make(stock: _Stock, draw: random.Random) -> str:
    """Nearly always an instruction about a topic."""
    makers: tuple[Callable[[_Stock, random.Random], str], ...] = (_about, _program, _edit, _sum)
    return draw.choices(makers, weights=(84, 6, 6, 4))[0](stock, draw)


def _about(stock: _Stock, draw: random.Random) -> str:
    topic, other = draw.sample(stock.topics, 2)
    return draw.choice(stock.kinds).format(topic=topic, other=other)


def _program(stock: _Stock, draw: random.Random) -> str:
    return draw.choice(_TASKS).format(task=draw.choice(stock.work))


def _edit(stock: _Stock, draw: random.Random) -> str:
    return draw.choice(_EDITS).format(text=draw.choice(stock.sentences))


def _sum(_: _Stock, draw: random.Random) -> str:
    """Arithmetic; the numbers are drawn, so that nearly none comes twice."""
    a, b, c = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 20)
    return draw.choice(
        (
            f"What is {a} + {b} * {c}? Show your work.",
            f"A box has {a} red and {b} blue balls. How many are there in {c} boxes?",
            f"A train goes {a} km in {c} minutes. How far does it go in an hour?",
            f"I have {a + b} dollars and spend {a}. How much is left? Explain step by step.",
            f"What is {c} percent of {a * 10}?",
        )
    )


def _list(text: str) -> list[str]:
    return [entry.strip() for line in text.strip().splitlines() for entry in line.split(";")]
