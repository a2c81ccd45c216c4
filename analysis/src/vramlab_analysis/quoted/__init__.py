"""What the documents say that is computed from the records: for each page its pieces, by the words that they open with.

`documents` puts them there. A piece may be in one module with others of its kind; this is the list of all.
"""

from __future__ import annotations

from vramlab_analysis import inside, truth
from vramlab_analysis.documents import Pieces
from vramlab_analysis.quoted import (
    acceptance_list,
    answers,
    builds,
    calls,
    field,
    inside_note,
    memory,
    notes,
    readme,
    simulated,
)

ANSWERS: Pieces = {
    f"| {answers.QUESTION} |": answers.questions,
    "Recorded on": answers.machines,
    "Builds, ": builds.sentence,
    "- One NVIDIA": readme.compared,
    "- The table is one comparison, the newest.": answers.hosts,
    "- Simulated times are fitted:": simulated.sentence,
    "- The simulator leaves out": simulated.own_code,
    f"| {simulated.TITLE} |": simulated.table,
    "- **It is the free that waits.**": answers.waiting,
    "- **Most `cuMemAlloc` are cheap:**": simulated.pages,
    "- **The driver's pool costs time on the device too,**": simulated.pool,
    "What the driver's calls cost here": simulated.source,
    "- **How far it is off.**": lambda: f"- {truth.sentence()}",
    f"| {memory.RESERVED} |": memory.family,
    "`experiments run family --device cuda`": memory.source,
    "- **RMM's pool is as its initial size is.**": memory.rmm,
    "- **What frees cost that wait for other streams.**": memory.waiting_frees,
    f"| {calls.OF_TIMES} |": lambda: calls.table(calls.OF_TIMES, calls.TIMES),
    f"| {calls.OF_RATES} |": lambda: calls.table(calls.OF_RATES, calls.RATES),
    "- `experiments bench --device cuda": calls.machine,
    "- Over the repeats": calls.noise,
    "- Instruments cost": calls.instruments,
    f"| {inside.TITLE} |": inside.table,
    "Peak reserved, a step over native": inside_note.source,
    "- **A loader that gives memory back": field.loader,
    "- **A loop that calls `empty_cache`**": field.emptied,
}
PIECES: dict[str, Pieces] = {
    "README.md": {
        "| allocator | epoch, ": answers.epochs,
        "One epoch of": readme.caption,
        "The simulated GPU is fitted to one.": simulated.short,
        f"| {truth.TITLE} |": truth.table,
        "- **Held out.**": lambda: f"- {truth.held_out()}",
        "Build ": readme.limits,
    },
    "experiments/answers.md": ANSWERS,
    "app/README.md": {"**Memory.** A history": readme.reading},
    "experiments/notes/inside.md": {**inside_note.PIECES, **acceptance_list.PIECES},
    **notes.PIECES,
}
