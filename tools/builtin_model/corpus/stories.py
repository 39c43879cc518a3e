"""Short stories: a hero with a trait, a place, something that happens, and an end."""

from __future__ import annotations

from tools.builtin_model.corpus.skills import Exchange
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.corpus.tables import ANIMALS, OBJECTS, PLACES, TRAITS, a

_REQUESTS = (
    "Tell me a story about {hero}.",
    "Tell me a short story about {hero}.",
    "Can you tell me a story about {hero}?",
    "Write a story about {hero}.",
    "Write a short story about {hero}, please.",
    "I want to hear a story about {hero}.",
    "Please tell me a story about {hero}.",
    "Make up a story about {hero}.",
    "story about {hero}",
)
_OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell me a short story, please.",
    "Can you tell me a story?",
    "Write a short story.",
    "I want to hear a story.",
)
_OPENINGS = (
    "Once upon a time, there was {hero} called {name}. {name} lived {place}.",
    "Once upon a time, {hero} called {name} lived {place}.",
    "Long ago, {place}, there lived {hero}. Everyone called {them} {name}.",
    "There was once {hero} whose name was {name}. {They} lived {place}.",
    "{name} was {hero} who lived {place}.",
)
_MORNINGS = (
    "One morning, {name} woke up early and went for a walk.",
    "One day, {name} felt that something new was going to happen.",
    "One cold winter day, {name} looked out of the window.",
    "One evening, when the moon was bright, {name} could not sleep.",
    "On a warm summer day, {name} was resting in the sun.",
    "One rainy afternoon, {name} had nothing to do.",
)
_PLOTS = (
    # (what happens, what the hero does, how it ends)
    (
        "Then {they} heard somebody cry for help. {friend} the {other} had fallen into a deep hole.",
        "{name} found a long rope and let it down. {friend} held it, and {name} pulled and pulled.",
        "At last {friend} was out. The two became best friends.",
    ),
    (
        "On the path {they} found {thing}. It was old and covered with dust.",
        "{name} asked everyone whose it was. In the end, {friend} the {other} said that it was lost "
        "long ago.",
        "{friend} was so happy that {they_friend} invited {name} to a big dinner.",
    ),
    (
        "Suddenly a great storm came. The wind blew away the house of {friend} the {other}.",
        '"Come and stay with me," said {name}. The next day they built a new house together.',
        "It was stronger than the old one, and {friend} never forgot it.",
    ),
    (
        "{They} met {friend} the {other}, who was very sad. {friend} had nobody to play with.",
        "{name} thought for a while. Then {they} taught {friend} a funny song, and they sang it "
        "all day.",
        "When the sun went down, both of them were laughing.",
    ),
    (
        "There was no food left. {name} had only one small apple.",
        "On the way {they} met {friend} the {other}, who was even hungrier. {name} cut the apple "
        "in two and gave away one half.",
        "In return, {friend} showed {name} a garden full of fruit.",
    ),
    (
        "{They} wanted to see what was behind the high hill. Nobody had ever gone there.",
        "The way was long and steep. {friend} the {other} came along, and together they climbed "
        "to the top.",
        "From there they saw the sea, and it was more beautiful than anything they knew.",
    ),
    (
        '{friend} the {other} came running. "The bridge is broken and I cannot go home!"',
        "{name} looked for wood, and they worked until the stars came out.",
        "When the bridge was ready, {friend} crossed it and waved goodbye.",
    ),
    (
        "{They} lost {thing} that {they} loved very much. {name} looked everywhere.",
        "Then {friend} the {other} had an idea. They followed the small marks on the ground, step "
        "by step.",
        "Behind an old tree they found it, and {name} thanked {friend} a hundred times.",
    ),
)
_ENDINGS = (
    "From that day on, everybody knew how {trait} {name} was.",
    "And so {name} learned that it is good to have a friend.",
    "That night {name} slept well and dreamed of the next adventure.",
    "And they lived happily ever after.",
    "{name} smiled, for it had been a very good day. The end.",
)


def story(source: Source) -> Exchange:
    """A request for a story, and one that keeps to it: 80 to 150 tokens."""
    trait, animal, place = source.together(source.of(TRAITS), source.of(ANIMALS), source.of(PLACES))
    name, friend = source.together(source.name, source.name)
    hero, asked = a(f"{trait} {animal}"), a(f"{trait} {animal}")
    where = ("on " if place == "island" else "near ") + a(place)
    style = source.integer(0, 4)
    if style == 1:
        asked = f"{asked} called {name}"
    elif style == 2:
        asked = f"{asked} who lives {where}"
    elif style == 3:
        asked = a(animal)
    they = source.choice(("he", "she"))
    words = {
        "hero": hero,
        "name": name,
        "friend": friend,
        "trait": trait,
        "place": where,
        "other": source.choice(ANIMALS),
        "thing": a(source.choice(OBJECTS)),
        "they": they,
        "They": they.capitalize(),
        "them": {"he": "him", "she": "her"}[they],
        "they_friend": source.choice(("he", "she")),
    }
    parts = (
        source.choice(_OPENINGS),
        source.choice(_MORNINGS),
        *source.choice(_PLOTS),
        source.choice(_ENDINGS),
    )
    requests = _OPEN_REQUESTS if style == 4 else _REQUESTS
    request = source.choice(requests).format(hero=asked)
    return Exchange("story", request, " ".join(parts).format_map(words), short=None)
