"""`metagym/SWE-v0`: software engineering in sandboxes, graded where the agent can't reach.

    env = gymnasium.make("metagym/SWE-v0")                     # tiny built-in tasks, bubblewrap
    env = gymnasium.make("metagym/SWE-v0", data="tasks.jsonl", sandbox="docker")

* env.py: the environment; tools.py: what an action means;
* shell.py, bubblewrap.py, docker.py, local.py: sandboxes; ledger.py, pool.py: none is left, some are warm;
* instances.py, datasets.py, toy.py: tasks; sites.py: packages that tests need;
* patches.py, grading.py, inside/: what goes into a grader, and how it judges;
* admission.py: which tasks are fit;
* mutation.py, sdists.py, build.py: tasks made here.
"""

from metagym.envs.swe.env import PROMPT, SWEEnv
from metagym.envs.swe.instances import Instance

__all__ = ["PROMPT", "Instance", "SWEEnv"]
