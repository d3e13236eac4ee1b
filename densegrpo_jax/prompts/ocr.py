"""A generator of prompts that ask for a text in the image: one to four words between double quotes, on a sign, a cup, a screen.

Templates and words are this project's own. A text belongs to train or to test by a hash of its words, so that every choice of numbers
and seeds keeps the two apart, and a list that grows keeps what it had.
"""

import hashlib

import numpy as np

TEST_SHARE = 8  # one text in so many is for testing

_ADJECTIVES = """amber ancient autumn brave bright calm clever cosmic crystal daily distant eager early electric emerald endless fresh
gentle golden grand happy hidden humble hungry icy iron jolly kind little lively lonely lucky magic marble merry mighty misty modern noble
northern odd open paper patient polar proud purple quiet rapid royal rustic sacred secret silent silver simple sleepy smooth solar southern
spicy spring steady stormy sturdy sunny sweet swift tender tidy tiny velvet vivid wandering warm wild winter wise wooden young""".split()

_NOUNS = """acorn anchor apple arrow atlas badger bakery barn basil beacon bicycle bridge candle canyon castle cedar cherry circus
clock cloud comet compass copper coral cricket dragon falcon feather fiddle forest fountain fox garden ginger glacier guitar harbor hazel
heron honey horizon island ivory jasmine jungle kettle kite ladder lantern lemon library lighthouse lion lotus maple market meadow melon
meteor mirror moon mountain museum nectar nutmeg oasis ocean olive orchard orchid otter owl panda pebble pepper piano pine planet plum
pocket pond puzzle quartz rabbit raven river robin rocket rose saffron salmon satellite sparrow spoon star stream studio sunset tavern
temple theater thistle thunder tiger tulip turtle valley velvet village violin walnut whale willow window zebra""".split()

_PLACES = "academy agency archive bakery books cafe cinema clinic club coffee gallery garage grocery hotel inn kitchen library market\
 museum pharmacy press records school shop society station studio supply tailor tours".split()

_VERBS = "bring build carry catch cherish climb cross discover draw enjoy explore find follow forgive greet guard imagine keep\
 learn love make open paint plant protect reach remember respect save see seek share taste thank visit watch welcome write".split()

# Words per text and the lists that make it. All are plain ASCII, within reach of every OCR engine.
_PATTERNS = {
    1: ((_NOUNS,), (_ADJECTIVES,)),
    2: ((_ADJECTIVES, _NOUNS), (_NOUNS, _PLACES), (_VERBS, _NOUNS)),
    3: ((_ADJECTIVES, _NOUNS, _PLACES), (_VERBS, ["the", "every", "your"], _NOUNS)),
    4: ((_VERBS, ["the", "every", "your"], _ADJECTIVES, _NOUNS), (["the"], _ADJECTIVES, _NOUNS, _PLACES)),
}

_SHARES = {1: 0.25, 2: 0.35, 3: 0.25, 4: 0.15}  # of texts by number of words

_TEMPLATES = (
    'a wooden sign beside a mountain trail that reads "{}"',
    'a neon sign in a rainy street at night that says "{}"',
    'a chalkboard outside a small shop with the words "{}"',
    'a white coffee cup on a desk, printed with "{}"',
    'the front page of a newspaper with the headline "{}"',
    'an old brick wall with "{}" painted on it in large letters',
    'a birthday cake with "{}" written on it in icing',
    'a folded T-shirt with the print "{}"',
    'a paperback on a bedside table, titled "{}"',
    'a film poster with the title "{}" across the top',
    'a glass shop door with a sticker that reads "{}"',
    'a subway platform with the station name "{}" on the wall',
    'a laptop whose screen shows "{}" in big letters',
    'a postage stamp with the inscription "{}"',
    'a street sign on a post at a crossing: "{}"',
    'a brass plate next to a door, engraved "{}"',
    'a hot air balloon with "{}" on its envelope, over fields',
    'a delivery van with "{}" lettered on its side',
    'a school blackboard on which someone wrote "{}"',
    'a yellow sticky note on a monitor that says "{}"',
    'a robot holding up a cardboard sign that reads "{}"',
    'a cat sitting next to a mailbox labelled "{}"',
    'a jar of jam with a handwritten label "{}"',
    'a theater marquee announcing "{}"',
    'a surfboard leaning on a fence, painted with "{}"',
    'a train in a snowy station with "{}" on the locomotive',
    'a flag above a sand castle that says "{}"',
    'a museum banner between two columns that reads "{}"',
    'a watercolor of a fishing boat named "{}"',
    'a pixel art game screen with the words "{}"',
    'a minimalist logo with the name "{}" on a plain background',
    'a vintage travel poster of a coast, with "{}" at the bottom',
    'a crate of oranges at a market, stamped "{}"',
    'a lighthouse on a cliff with "{}" on its tower',
    'a scoreboard in a stadium that displays "{}"',
    'an astronaut next to a flag on the moon, the flag says "{}"',
)


def generate(train: int = 10_000, test: int = 1000, seed: int = 0) -> tuple[list[str], list[str]]:
    """Prompts for training and for testing. No prompt comes twice, in whatever case, and no text to be written is in both.

    Args:
      train, test: numbers of prompts.
      seed: of the choice.

    Raises:
      ValueError: a negative number, or more prompts than there are.
    """
    return _draw(train, False, seed), _draw(test, True, seed)


def _draw(count: int, testing: bool, seed: int) -> list[str]:
    if count < 0:
        raise ValueError(f"{count} prompts: must not be negative")
    rng = np.random.default_rng([seed, int(testing)])
    found: dict[str, str] = {}
    misses = 0
    while len(found) < count:
        words = int(rng.choice(list(_SHARES), p=list(_SHARES.values())))
        lists = _PATTERNS[words][rng.integers(len(_PATTERNS[words]))]
        text = " ".join(choices[rng.integers(len(choices))] for choices in lists)
        if is_for_testing(text) != testing:
            continue
        style = (str.upper, str.title, str.capitalize, str.lower)[rng.integers(4)]
        prompt = _TEMPLATES[rng.integers(len(_TEMPLATES))].format(style(text))
        plain = prompt.casefold()  # the reward does not see case
        misses = misses + 1 if plain in found else 0
        if misses == 10_000:
            raise ValueError(f"{count} different {'test' if testing else 'train'} prompts were asked for; there are about {len(found)}")
        found.setdefault(plain, prompt)
    return list(found.values())


def is_for_testing(text: str) -> bool:
    """Whether prompts for this text, in whatever case, are for testing."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).digest()[0] % TEST_SHARE == 0
