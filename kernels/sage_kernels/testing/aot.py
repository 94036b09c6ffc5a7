"""Ahead-of-time compilation of recorded launches, for any architecture and without a GPU, and their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from ..triton.common.launch import RecordedLaunch

MATRIX_INSTRUCTION = re.compile(r"(UTC)?[A-Z]G?MMA$")
SPILLS = ("LDL", "STL")

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_UNIFORM_PREDICATE = re.compile(r"\bU?P\d")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"\.L_\w+")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Instructions:
    """Instruction counts of a kernel or of one of its loops, by opcode without modifiers.

    Attributes:
        counts: of every instruction, executed or not.
        skippable: how many of a loop's instructions lie between a conditional branch and its target further on.
    """

    counts: Counter[str]
    skippable: int = 0

    @property
    def total(self) -> int:
        """Return the number of instructions."""
        return self.counts.total()

    @property
    def least(self) -> int:
        """Return the number of instructions of a pass that takes every forward branch."""
        return self.total - self.skippable

    @property
    def matrix_opcodes(self) -> frozenset[str]:
        """Return the opcodes of MMA instructions, such as IMMA or HGMMA."""
        return frozenset(opcode for opcode in self.counts if MATRIX_INSTRUCTION.match(opcode))

    @property
    def matrix_products(self) -> int:
        """Return the number of MMA instructions."""
        return sum(self.counts[opcode] for opcode in self.matrix_opcodes)

    @property
    def spills(self) -> int:
        """Return the number of instructions that move registers to local memory or back."""
        return sum(self.counts[opcode] for opcode in SPILLS)


@dataclass(frozen=True)
class MachineCode:
    """A kernel's instructions and resources.

    Attributes:
        instructions: counts of the whole kernel.
        loops: counts of each loop, inner loops included, in the order of the loops' ends.
        registers: registers per thread.
        stack_bytes: bytes of stack per thread.
    """

    instructions: Instructions
    loops: tuple[Instructions, ...]
    registers: int
    stack_bytes: int

    @property
    def main_loop(self) -> Instructions:
        """Return the shortest of the loops with the most MMA instructions.

        Raises:
            ValueError: no loop has MMA instructions.
        """
        loops = [loop for loop in self.loops if loop.matrix_products]
        return max(loops, key=lambda loop: (loop.matrix_products, -loop.total))

    @property
    def lean_loop(self) -> Instructions:
        """Return the shortest of the loops with MMA instructions: the loop without masks.

        Raises:
            ValueError: no loop has MMA instructions.
        """
        return min((loop for loop in self.loops if loop.matrix_products), key=lambda loop: loop.total)


class _CompileOnlyDriver:
    """A Triton driver that only compiles: it names the architecture, and a device, the key of the JIT's cache."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


def compile_launch(launch: RecordedLaunch, capability: tuple[int, int]) -> CompiledKernel:
    """Compile `launch` as on a GPU of that capability, specialised to the same arguments.

    Do not use it while other threads launch kernels: it temporarily replaces Triton's driver.
    """
    state = dict(vars(driver))
    driver.set_active(_CompileOnlyDriver(capability))
    try:
        return launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    finally:
        vars(driver).update(state)


def machine_code(cubin: bytes) -> MachineCode:
    """Disassemble a kernel, `compile_launch(...).asm["cubin"]`, with the tools that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    resources = _RESOURCES.search(usage)
    if resources is None:
        raise ValueError(f"cuobjdump reports no resource usage: {usage}")
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    ahead: list[tuple[int, str]] = []
    after_exit = 0
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.search(line):
            predicate, opcode, operands = instruction.groups()
            opcode = opcode.partition(".")[0]
            opcodes.append(opcode)
            if opcode == "EXIT" and not predicate:
                after_exit = len(opcodes)
            target = _TARGET.search(operands) if opcode == "BRA" else None
            # Backward branches from after the exit rejoin divergent warps: they are not loops.
            if target and labels.get(target[0], -1) >= after_exit:
                loops.append((labels[target[0]], len(opcodes)))
            elif target and target[0] not in labels and (predicate or _UNIFORM_PREDICATE.search(operands)):
                ahead.append((len(opcodes), target[0]))

    def loop_of(start: int, end: int) -> Instructions:
        skipped = {
            position
            for branch, label in ahead
            if start <= branch and labels.get(label, end) < end
            for position in range(branch, labels[label])
        }
        return Instructions(Counter(opcodes[start:end]), len(skipped))

    return MachineCode(
        Instructions(Counter(opcodes)),
        tuple(loop_of(*loop) for loop in loops),
        int(resources[1]),
        int(resources[2]),
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
