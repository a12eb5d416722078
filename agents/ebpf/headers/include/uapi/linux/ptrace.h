/* Registers of a probed thread, as the kernel hands them to BPF programs. */
#pragma once

#include <linux/types.h>

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
struct pt_regs {
    u64 regs[31];
    u64 sp;
    u64 pc;
    u64 pstate;
};
#else
struct pt_regs {
    unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
    unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#endif
