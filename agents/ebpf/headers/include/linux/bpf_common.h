/* Instruction classes of packet filters, which bcc's helpers name. */
#pragma once

#define BPF_CLASS(code) ((code) & 0x07)
#define BPF_LD 0x00
#define BPF_LDX 0x01
#define BPF_ST 0x02
#define BPF_STX 0x03
#define BPF_ALU 0x04
#define BPF_JMP 0x05
#define BPF_W 0x00
#define BPF_H 0x08
#define BPF_B 0x10
#define BPF_K 0x00
#define BPF_X 0x08
#define BPF_MAXINSNS 4096
