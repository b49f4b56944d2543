from trace_megatron.tree_files import read_trees, write_trees
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn


def test_trees_come_back_equal(tmp_path):
    task = Task(
        "t/1",
        ({"role": "user", "content": "2+3=? \u2028 ü"},),
        {"answer": "5"},
        ({"type": "function", "function": {"name": "f"}},),
    )
    turns = (Turn((5, 6), (-0.1, -1.234567890123), (7,), 3), Turn((8,), (-2.0,), (), 3))
    tree = RolloutTree(
        Prompt("t/1#2", task, (1, 2, 3)),
        (
            Rollout(ROOT, turns, 0.25, RolloutStatus.TURN_LIMIT, info={"answer": "6"}),
            Rollout(Anchor(0, 1), turns[1:], 1.0, RolloutStatus.FINISHED),
            Rollout(ROOT, (), 0.0, RolloutStatus.ENGINE_ERROR, trained=False),
        ),
        prefix_probs=(0.1, 0.7),
    )
    path = tmp_path / "trees" / "step_000001.jsonl.zst"
    write_trees(path, [tree, tree])
    assert read_trees(path) == [tree, tree]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
