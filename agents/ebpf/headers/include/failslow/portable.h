/* One source for two loaders: bcc, which compiles at load time, and clang with libbpf (CO-RE).
 *
 * A program uses only what is declared here. Maps are read and written by LOOKUP, UPDATE, DELETE and OUTPUT, each with
 * the map's name as its first argument: for libbpf they are macros, and for bcc, which refuses map functions inside
 * macros, agents/ebpf/bcc_backend.py spells them in bcc's way before it compiles.
 */
#pragma once

#include <linux/types.h>
#include <uapi/linux/ptrace.h>

/* An array that user space maps and reads as its own memory. */
#ifndef BPF_F_MMAPABLE
#define BPF_F_MMAPABLE 1024
#endif

#ifdef FAILSLOW_BCC

#define PROGRAM
#define HASH(name, key, value, entries) BPF_TABLE("hash", key, value, name, entries)
#define LRU_HASH(name, key, value, entries) BPF_TABLE("lru_hash", key, value, name, entries)
#define PERCPU_HASH(name, key, value, entries) BPF_TABLE("percpu_hash", key, value, name, entries)
#define ARRAY(name, value, entries) BPF_TABLE("array", u32, value, name, entries)
#define SHARED_ARRAY(name, value, entries) BPF_F_TABLE("array", u32, value, name, entries, BPF_F_MMAPABLE)
#define RING(name, bytes) BPF_RINGBUF_OUTPUT(name, (bytes) / PAGE_BYTES)

#else

#define __SECTION(name) __attribute__((section(name), used))
#define PROGRAM __SECTION("uprobe")
#define __NUMBER(name, value) int(*name)[value]
#define __MAP(name, kind, key_type, value_type, n)                                                                     \
    struct {                                                                                                           \
        __NUMBER(type, kind);                                                                                          \
        __NUMBER(max_entries, n);                                                                                      \
        key_type *key;                                                                                                 \
        value_type *value;                                                                                             \
    } name __SECTION(".maps")
#define HASH(name, key, value, entries) __MAP(name, 1, key, value, entries)
#define ARRAY(name, value, entries) __MAP(name, 2, u32, value, entries)
#define SHARED_ARRAY(name, value_type, n)                                                                              \
    struct {                                                                                                           \
        __NUMBER(type, 2);                                                                                             \
        __NUMBER(max_entries, n);                                                                                      \
        __NUMBER(map_flags, BPF_F_MMAPABLE);                                                                           \
        u32 *key;                                                                                                      \
        value_type *value;                                                                                             \
    } name __SECTION(".maps")
#define PERCPU_HASH(name, key, value, entries) __MAP(name, 5, key, value, entries)
#define LRU_HASH(name, key, value, entries) __MAP(name, 9, key, value, entries)
#define RING(name, bytes)                                                                                              \
    struct {                                                                                                           \
        __NUMBER(type, 27);                                                                                            \
        __NUMBER(max_entries, bytes);                                                                                  \
    } name __SECTION(".maps")

/* Helper functions by the kernel's numbers (linux/bpf.h). */
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_user_str)(void *to, u32 size, const void *from) = (void *)114;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
#define BPF_RB_NO_WAKEUP 1

#define LOOKUP(map, key) bpf_map_lookup_elem(&map, key)
#define UPDATE(map, key, value) bpf_map_update_elem(&map, key, value, 0)
#define DELETE(map, key) bpf_map_delete_elem(&map, key)
#define OUTPUT(ring, data, size, flags) bpf_ringbuf_output(&ring, data, size, flags)

char LICENSE[] __SECTION("license") = "GPL";

#endif

/* Arguments of the probed function by their position, and its stack pointer, as the platforms' calling conventions
 * have them. At a return probe on x86-64 the return address has left the stack. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define ARG1(ctx) ((ctx)->regs[0])
#define ARG2(ctx) ((ctx)->regs[1])
#define ARG3(ctx) ((ctx)->regs[2])
#define ARG4(ctx) ((ctx)->regs[3])
#define ARG5(ctx) ((ctx)->regs[4])
#define ARG6(ctx) ((ctx)->regs[5])
#define ARG7(ctx) ((ctx)->regs[6])
#define RESULT(ctx) ((ctx)->regs[0])
#define STACK(ctx) ((ctx)->sp)
#define STACK_AFTER_RETURN(stack) (stack)
#else
#define ARG1(ctx) ((ctx)->di)
#define ARG2(ctx) ((ctx)->si)
#define ARG3(ctx) ((ctx)->dx)
#define ARG4(ctx) ((ctx)->cx)
#define ARG5(ctx) ((ctx)->r8)
#define ARG6(ctx) ((ctx)->r9)
#define ARG7(ctx) read_u64((ctx)->sp + 8)
#define RESULT(ctx) ((ctx)->ax)
#define STACK(ctx) ((ctx)->sp)
#define STACK_AFTER_RETURN(stack) ((stack) + 8)
#endif

/* Reads a word of the current process; 0 where it cannot. */
static __always_inline u64 read_u64(u64 address)
{
    u64 value = 0;
    bpf_probe_read_user(&value, sizeof(value), (void *)address);
    return value;
}
