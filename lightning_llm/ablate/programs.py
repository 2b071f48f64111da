"""The programs whose runs can be compared, by the name that a plan holds."""

from lightning_llm.ablate.command.program import CommandProgram
from lightning_llm.ablate.fit.program import Fit
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.program import Program

PROGRAMS: dict[str, type[Program]] = {Fit.name: Fit, CommandProgram.name: CommandProgram}


def program_of(plan: Plan) -> Program:
    """The program of a plan.

    Raises:
        ValueError: There is none of its name.
    """
    name = plan.record.program
    if name not in PROGRAMS:
        raise ValueError(f"{plan.out} was planned for the program {name!r}; this version has {', '.join(PROGRAMS)}")
    return PROGRAMS[name](plan)
