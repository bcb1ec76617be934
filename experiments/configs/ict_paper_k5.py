"""The setting of In-Context Training's paper on ALFWorld with k = 5 tasks a batch; see ict_paper.

Time: not run. Expected: what the paper reports; nothing was measured with this code.
Command: as for ict_paper, with
make train CONFIG=experiments/configs/ict_paper_k5.py ARGS=--workdir=DIR
"""

from metagym.experiments.configs import ict_paper


def get_config():
    config = ict_paper.get_config()
    config.ict.k = 5
    config.ict.data = config.world.kwargs.data = "runs/ict_paper_k5/tuples.jsonl"
    return config
