"""The setting of the paper on In-Context Training with MiniHack, and transfer to ALFWorld; see ict_paper.

Time: not run. Expected: what the paper reports; nothing was measured with this code.
Command: as for ict_paper, with
make train CONFIG=experiments/configs/ict_paper_minihack.py ARGS=--workdir=DIR
"""

from metagym.experiments.config import ict_evaluation
from metagym.experiments.configs import ict_paper

# Not in the paper: which types are trained on and which are held out.
TRAIN = (
    *("MiniHack-Room-5x5-v0", "MiniHack-Room-Random-5x5-v0", "MiniHack-Room-Monster-5x5-v0"),
    *("MiniHack-Room-Trap-5x5-v0", "MiniHack-Corridor-R2-v0", "MiniHack-Corridor-R3-v0"),
)


def get_config():
    config = ict_paper.get_config()
    config.ict.world = "metagym/MiniHack-v0"
    config.ict.world_kwargs = ict_paper.MINIHACK
    config.ict.types = TRAIN
    held_out = tuple(t for t in ict_paper.MINIHACK_TYPES if t not in TRAIN)
    config.ict.held_out = config.world.kwargs.held_out = held_out
    config.ict.data = config.world.kwargs.data = "runs/ict_paper_minihack/tuples.jsonl"
    common = {
        "meta_turns": 8,
        "runs": 8,
        "reflectors": ("initial", "noop", "untrained", "best_of", "trained"),
    }
    config.ict.evaluate.held_out = ict_evaluation(types=held_out, k=(1, 3, 5), validation=10, **common)
    config.ict.evaluate.transfer = ict_evaluation(
        world=ict_paper.WORLD,
        types=ict_paper.HELD_OUT,
        split="train",
        validation=10,
        validation_split="valid_seen",
        **common,
    )
    return config
