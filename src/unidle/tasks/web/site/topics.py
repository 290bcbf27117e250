"""Vocabulary of the generated pages: a few words for each topic, and many neutral ones."""

from __future__ import annotations

from itertools import product

TOPICS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in {
        "astronomy": "comet orbit telescope galaxy nebula planet eclipse asteroid quasar pulsar meteor solar stellar",
        "cooking": "recipe oven simmer butter flour garlic roast whisk dough broth saucepan knead basil pastry",
        "cycling": "bicycle saddle pedal gravel peloton derailleur handlebar velodrome crank tyre spoke helmet",
        "gardening": "compost seedling prune mulch tulip perennial trellis greenhouse fertiliser orchard hedge soil",
        "medicine": "diagnosis vaccine surgery symptom antibody clinic dosage therapy patient tumour immune nurse",
        "music": "violin chord melody symphony rhythm orchestra tempo sonata choir cello harmony octave drummer lyric",
        "sailing": "mast keel rudder spinnaker harbour regatta mooring halyard starboard anchor jib tiller hull buoy",
        "volcanoes": "lava magma eruption crater caldera basalt tephra geyser tectonic fumarole pumice seismic ash",
    }.items()
}

# Six hundred neutral words: `balo`, `beri`, …; none of them is in a topic.
_HEADS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr", "sh", "ch", "gl")
_TAILS = ("alo", "eri", "ina", "omu", "ura", "ate", "ile", "ond", "uge", "ask")
_ENDS = ("", "n", "st")
PLAIN_WORDS = tuple(head + tail + end for head, tail, end in product(_HEADS, _TAILS, _ENDS))
VAGUE_LINKS = ("read more", "click here", "next", "details", "see also", "this page", "more")
# Words next to the topic in honest links, and in misleading ones.
HONEST_WORDS = ("guide", "history", "study", "notes", "manual")
ADVERTISING_WORDS = ("offer", "winner", "sponsored", "deal", "bargain")
