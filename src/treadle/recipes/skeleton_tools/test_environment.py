"""pytest treadle/recipes/skeleton_tools: the tools, called by a script instead of a model."""

from treadle.recipes.skeleton_tools.environment import Shop, tasks


def shop(split: str, index: int) -> Shop:
    """Return the environment of a task."""
    environment = Shop()
    environment.task = tasks(split, index + 1)[index]
    return environment


def test_what_the_tools_say_leads_to_the_answer() -> None:
    one, two = shop("train", 1), shop("train", 0)
    asked = str(one.task.prompt[0]["content"]).split()
    assert one.answered(str(one.price(asked[2]))) == 1
    customer = str(two.task.prompt[0]["content"]).split()[2]
    assert two.answered(str(two.price(two.bought(customer)))) == 1
    assert two.answered("I do not know") == 0


def test_the_model_is_told_of_both_tools() -> None:
    assert [tool["function"]["name"] for tool in Shop().tool_schemas] == ["bought", "price"]


def test_splits_share_no_task() -> None:
    assert not {task.task_id for task in tasks("train", 32)} & {task.task_id for task in tasks("held_out", 32)}
