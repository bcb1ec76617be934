"""In-Context Training in seconds: a tiny random model reflects on the world of rules.

Shows that everything is wired, not that anything is learned.

Time: a minute on two cores, most of it compiling. Expected: returns at chance.
Command: metagym ict collect --config=ict_debug, then
make train CONFIG=experiments/configs/ict_debug.py ARGS=--workdir=DIR, then
metagym ict eval --config=ict_debug --workdir=DIR
"""

from metagym.experiments.config import base, ict_evaluation


def get_config():
    config = base()
    config.steps = 1
    config.model.name = "random"
    config.model.chat_template = "plain"
    config.model.chunk = 64

    config.ict.world = "metagym/Rules-v0"
    config.ict.types = ("doors-red", "food-plum")
    config.ict.held_out = ("keys-iron-oak", "tools-saw")
    config.ict.k = 2
    config.ict.meta_turns = 2
    config.ict.data = "runs/ict_debug/tuples.jsonl"
    config.ict.transcript = {"head": "{prompt}", "episode": "", "end": "", "turn": "{observation} {action}"}
    config.actor.kind = "rule_follower"

    config.world.id = "metagym/Reflect-v0"
    config.world.kwargs.data = config.ict.data
    config.world.kwargs.held_out = config.ict.held_out
    config.agent.kind = "reflector"
    config.agent.template = "{observation}\nAdvice:"
    config.agent.history = False
    config.sampling.max_tokens = 4
    config.sampling.context = 768

    # A random model says nothing of use, so all advantages are 0: the entropy bonus gives the update work.
    config.algorithm.args.entropy_coef = 0.01
    config.algorithm.args.drop_equal = False
    config.groups_per_step = 2
    config.group_size = 2
    config.max_workers = 4
    config.mesh.fsdp = 1
    config.batch.rows = 1
    config.batch.length = 768
    config.batch.share_prompts = True
    config.engine.slots = 4

    config.ict.evaluate.held_out = ict_evaluation(
        types=config.ict.held_out,
        k=(1, 3),
        meta_turns=3,
        validation=2,
        best_of=2,
        reflectors=("initial", "noop", "random_action", "untrained", "best_of", "trained"),
    )
    config.ict.evaluate.toy = ict_evaluation(
        world="metagym/Toy-v0", types=("doors-red",), reflectors=("initial",), meta_turns=1
    )
    return config
