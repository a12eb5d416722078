"""The few functions that have to be machine code: those that are probed, and the loops that call them.

A node has no compiler, and a loop in Python takes longer than what is measured. native.<machine>.s is the source; the
bytes come from `clang -target <machine>-linux-gnu -c native.<machine>.s -o code.o`, and then
`llvm-objcopy -O binary -j .text code.o text && xxd -p text`.
"""

import platform
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The functions of one kind of processor, and where they begin."""

    elf_machine: int
    text: bytes
    call: int  # offset; `probed` is at 0
    pass_on: int
    read: int  # number of the system call
    write: int


_X86_64: Final = MachineCode(
    elf_machine=62,
    text=bytes.fromhex(
        "554889e531c05dc3cccccccccccccccc554889e55341544155415641574883ec1848c70424000000004c894424084c894c24104989fc4989f5"
        "4889d34989cf41be01000000488b442408488b4c2410eb06fe004883c0404883e9407df431ff31f64c89f2b9070000004531c041b901000000"
        "41ffd44d01fe4d87ec48ffcb75c54883c418415f415e415d415c5b5dc3cc554889e55341544155415641574883ec084989fc4989f54989d649"
        "89cf4c89c34c89e04c89ef4889e6ba010000000f054883f801751b4c89f04c89ff4889e6ba010000000f054883f801750548ffcb75cf4889d8"
        "4883c408415f415e415d415c5b5dc3"
    ),
    call=0x10,
    pass_on=0x90,
    read=0,
    write=1,
)
_AARCH64: Final = MachineCode(
    elf_machine=183,
    text=bytes.fromhex(
        "fd7bbfa9fd03009100008052fd7bc1a8c0035fd61f2003d51f2003d51f2003d5fd7bbba9fd030091f35301a9f55b02a9f76303a9f92300f9f3"
        "0300aaf40301aaf50302aaf60303aaf70304aaf80305aa390080d2e90317aaea0318aa040000142b0140396b0500112b0504384a0101f18aff"
        "ff54000080d2010080d2e20319aae300805204008052250080d2060080d260023fd63903168be90313aaf30314aaf40309aab50600f161fdff"
        "54f35341a9f55b42a9f76343a9f92340f9fd7bc5a8c0035fd61f2003d51f2003d51f2003d5ff4300d1e90300aaea0301aaeb0302aaec0303aa"
        "ed0304aae80309aae0030aaae1030091220080d2010000d41f0400f141010054e8030baae0030caae1030091220080d2010000d41f0400f161"
        "000054ad0500f121feff54e0030daaff430091c0035fd6"
    ),
    call=0x20,
    pass_on=0xD0,
    read=63,
    write=64,
)

BY_MACHINE: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}


def own() -> MachineCode | None:
    """Return what runs on this machine; None where it is of a kind that nobody has written this for."""
    return BY_MACHINE.get(platform.machine())
