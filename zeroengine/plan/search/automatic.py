"""Choose the stage and the offload that a configuration leaves to ``initialize`` by "auto"."""

from __future__ import annotations

from zeroengine.config import Config
from zeroengine.config.fields import CHOSEN
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import FreeMemory
from zeroengine.memory.state_choice import SECTIONS
from zeroengine.memory.state_memory import StateMemory
from zeroengine.utils.formats import format_byte_size

# "auto" leaves this share of the free device memory for activations, if any choice does.
ACTIVATION_SHARE = 0.25


def choose_states(memory: StateMemory, free: FreeMemory) -> tuple[Config, str]:
    """Return the configuration with a choice for every "auto", and a sentence that says what and why.

    This is the cheapest choice that leaves ``ACTIVATION_SHARE`` of the device. If none does, it is that which takes the
    least of the device.

    Args:
        memory: What states take with each choice.
        free: The memory that each rank may take.

    Raises:
        ZeroEngineError: The configuration leaves no choice.
    """
    zero = memory.config.zero_optimization
    devices = [getattr(zero, name).device for name in SECTIONS]
    options = memory.choices(zero.stage, *devices, any_disk=False)
    if not options:
        raise ZeroEngineError(
            'zero_optimization: "stage": "auto" finds no stage at which this optimizer works with offload_param; '
            'write "offload_param": {"device": "none"}'
        )
    roomy = (choice for choice in options if memory.requirement(choice).fits(free, 1 - ACTIVATION_SHARE))
    choice = next(roomy, None)
    if choice is None:
        fitting = [option for option in options if memory.requirement(option).fits(free)]
        choice = min(fitting or options, key=lambda option: memory.requirement(option).device)
        reason = "no choice leaves a quarter for activations, and this one leaves the most"
    elif choice is options[0]:
        reason = "the rest is for activations"
    else:
        before = options[options.index(choice) - 1]
        size = format_byte_size(memory.requirement(before).device)
        reason = f"{before.in_words()} would take {size}, which leaves less than a quarter for activations"
    keys = [f"stage {choice.stage}"] if zero.stage == CHOSEN else []
    keys += [f"{name} {getattr(choice, name)}" for name in SECTIONS if getattr(zero, name).device == CHOSEN]
    taken = format_byte_size(max(memory.requirement(choice).device, 0))
    return choice.applied(memory.config), (
        f'"auto" is {", ".join(keys)}: it takes {taken} of the {format_byte_size(free.device)} that are free for a '
        f"rank; {reason}."
    )
