/* What the scheduler, the memory manager and the block layer do to the threads of rank processes.
 *
 * Each thread has one entry of `threads`: the state that it is in, since when, and for how long it has been in each state
 * before. A thread is in one place at a time, so its entry needs no atomic operation. What a thread leaves behind when it
 * ends goes to its process, in the copy of the CPU that it ended on. Nothing is sent; user space reads the maps.
 *
 * sched_switch and sched_wakeup run for every thread of the node, thousands of times a second: they are spared the record
 * that the kernel would fill first, and look no further than one word for threads of no interest.
 */
#include <failslow/portable.h>

/* Kernel programs come in two kinds here. A typed one is handed the arguments of the kernel's own call, by number, and may
 * follow those that the kernel knows the types of. A record one is handed a record whose layout the kernel describes in
 * tracefs, and which it has to fill first. Where a field lies is the running kernel's business: user space looks it up,
 * in the kernel's type information or in tracefs, and says it as NAME_AT. */
#ifdef FAILSLOW_BCC
#define TYPED(name, event) int name(u64 *ctx)
#define RECORD(name, group, event) int name(u64 *ctx)
#define PERCPU_ARRAY(name, value, entries) BPF_TABLE("percpu_array", u32, value, name, entries)
#else
#define TYPED(name, event) __SECTION("tp_btf/" #event) int name(u64 *ctx)
#define RECORD(name, group, event) __SECTION("tp/" #group "/" #event) int name(u64 *ctx)
#define PERCPU_ARRAY(name, value, entries) __MAP(name, 6, u32, value, entries)
#endif
#define FIELD(type, at) (*(type *)((char *)ctx + (at)))

enum state { RUNNING, RUNNABLE, SLEEPING, BLOCKED, STOPPED, UNKNOWN };
#define STATES 8 /* a power of two, for the verifier */

/* The bits of a thread's state in the kernel that have never changed. */
#define IS_SLEEPING 0x01
#define IS_BLOCKED 0x02
#define IS_STOPPED 0x0c /* by a signal, by a debugger */

#define SHARES_PROCESS 0x10000 /* CLONE_THREAD */

#define THREADS_MAX 16384
#define PROCESSES_MAX 256
#define REQUESTS_MAX 8192
#define FILTER_SIZE 65536

struct thread {
    u64 ns[STATES];
    u64 switches;
    u64 reclaim_ns;
    u64 since; /* behind `ns`, and written before it: a copy made in between has too little time, never too much */
    u64 reclaim_since;
    u32 state;
    u32 process;
};

struct process {
    u64 ns[STATES];
    u64 switches;
    u64 reclaim_ns;
    u64 io_ns;
    u64 io_requests;
};

struct request {
    u64 sector;
    u64 device;
};

struct start {
    u64 since;
    u64 process;
};

/* Not 0 where a thread whose number ends alike is, or once was, one of a rank process: spares the others the search. */
ARRAY(filter, u64, FILTER_SIZE);
HASH(threads, u32, struct thread, THREADS_MAX);
PERCPU_ARRAY(processes, struct process, PROCESSES_MAX);
LRU_HASH(requests, struct request, struct start, REQUESTS_MAX);
ARRAY(lost_threads, u64, 1);

static __always_inline struct thread *followed(u32 tid)
{
    u32 place = tid & (FILTER_SIZE - 1);
    u64 *maybe = LOOKUP(filter, &place);
    if (!maybe || !*maybe)
        return 0;
    return LOOKUP(threads, &tid);
}

static __always_inline struct thread *current(void)
{
    return followed((u32)bpf_get_current_pid_tgid());
}

static __always_inline void enter(struct thread *thread, u64 now, u32 state)
{
    u64 since = thread->since;
    u32 before = thread->state & (STATES - 1);
    thread->since = now;
    thread->state = state;
    asm volatile("" ::: "memory");
    thread->ns[before] += now - since;
}

static __always_inline u32 off_cpu(u64 bits)
{
    if (bits & IS_STOPPED)
        return STOPPED;
    if (bits & IS_BLOCKED)
        return BLOCKED;
    return bits & IS_SLEEPING ? SLEEPING : RUNNABLE;
}

static __always_inline int switched(u32 prev, u64 prev_state, u32 next)
{
    u64 now = 0;
    struct thread *out = followed(prev);
    if (out) {
        now = bpf_ktime_get_ns();
        out->switches++;
        enter(out, now, off_cpu(prev_state));
    }
    struct thread *in = followed(next);
    if (in)
        enter(in, now ? now : bpf_ktime_get_ns(), RUNNING);
    return 0;
}

static __always_inline int woken(u32 tid)
{
    struct thread *thread = followed(tid);
    if (thread && thread->state != RUNNING && thread->state != RUNNABLE)
        enter(thread, bpf_ktime_get_ns(), RUNNABLE);
    return 0;
}

static __always_inline u32 tid_of(u64 task)
{
    return *(u32 *)(task + TASK_PID_AT);
}

TYPED(host_switch, sched_switch)
{
    /* A thread that is preempted on its way to sleep has not left the run queue. */
    u64 is_preempted = ctx[0] & 0xff;
    return switched(tid_of(ctx[1]), is_preempted ? 0 : ctx[3], tid_of(ctx[2]));
}

TYPED(host_wakeup, sched_wakeup)
{
    return woken(tid_of(ctx[0]));
}

/* For kernels that describe no types, or whose own call has other arguments (before Linux 5.18). */
RECORD(host_switch_record, sched, sched_switch)
{
    return switched(FIELD(u32, SWITCH_PREV_PID_AT), FIELD(u64, SWITCH_PREV_STATE_AT), FIELD(u32, SWITCH_NEXT_PID_AT));
}

RECORD(host_wakeup_record, sched, sched_wakeup)
{
    return woken(FIELD(u32, WAKEUP_PID_AT));
}

RECORD(host_thread_begins, task, task_newtask)
{
    if (!(FIELD(u64, NEWTASK_FLAGS_AT) & SHARES_PROCESS))
        return 0;
    struct thread *parent = current();
    if (!parent)
        return 0;
    u64 yes = 1;
    u32 tid = FIELD(u32, NEWTASK_PID_AT);
    u32 place = tid & (FILTER_SIZE - 1);
    struct thread thread = {};
    thread.since = bpf_ktime_get_ns();
    thread.state = RUNNABLE;
    thread.process = parent->process;
    UPDATE(filter, &place, &yes);
    if (UPDATE(threads, &tid, &thread)) {
        u32 first = 0;
        u64 *lost = LOOKUP(lost_threads, &first);
        if (lost)
            *lost += 1;
    }
    return 0;
}

RECORD(host_thread_ends, sched, sched_process_exit)
{
    u32 tid = (u32)bpf_get_current_pid_tgid();
    struct thread *thread = current();
    if (!thread)
        return 0;
    enter(thread, bpf_ktime_get_ns(), RUNNING);
    u32 place = thread->process;
    struct process *process = LOOKUP(processes, &place);
    if (process) {
#pragma unroll
        for (int state = 0; state < STATES; state++)
            process->ns[state] += thread->ns[state];
        process->switches += thread->switches;
        process->reclaim_ns += thread->reclaim_ns;
    }
    DELETE(threads, &tid);
    return 0;
}

static __always_inline int reclaim_begins(void)
{
    struct thread *thread = current();
    if (thread)
        thread->reclaim_since = bpf_ktime_get_ns();
    return 0;
}

static __always_inline int reclaim_ends(void)
{
    struct thread *thread = current();
    if (thread && thread->reclaim_since) {
        u64 since = thread->reclaim_since;
        thread->reclaim_since = 0;
        asm volatile("" ::: "memory");
        thread->reclaim_ns += bpf_ktime_get_ns() - since;
    }
    return 0;
}

RECORD(host_direct_reclaim_begins, vmscan, mm_vmscan_direct_reclaim_begin)
{
    return reclaim_begins();
}

RECORD(host_direct_reclaim_ends, vmscan, mm_vmscan_direct_reclaim_end)
{
    return reclaim_ends();
}

RECORD(host_group_reclaim_begins, vmscan, mm_vmscan_memcg_reclaim_begin)
{
    return reclaim_begins();
}

RECORD(host_group_reclaim_ends, vmscan, mm_vmscan_memcg_reclaim_end)
{
    return reclaim_ends();
}

/* Where a process asks for the request itself, be it sent to the device at once or later by a thread of the kernel. */
RECORD(host_request_begins, block, block_io_start)
{
    struct thread *thread = current();
    if (!thread)
        return 0;
    struct request request = {};
    struct start start = {};
    request.sector = FIELD(u64, REQUEST_SECTOR_AT);
    request.device = FIELD(u32, REQUEST_DEVICE_AT);
    start.since = bpf_ktime_get_ns();
    start.process = thread->process;
    UPDATE(requests, &request, &start);
    return 0;
}

RECORD(host_request_ends, block, block_rq_complete)
{
    struct request request = {};
    request.sector = FIELD(u64, COMPLETE_SECTOR_AT);
    request.device = FIELD(u32, COMPLETE_DEVICE_AT);
    struct start *start = LOOKUP(requests, &request);
    if (!start)
        return 0;
    u32 place = (u32)start->process;
    struct process *process = LOOKUP(processes, &place);
    if (process) {
        process->io_ns += bpf_ktime_get_ns() - start->since;
        process->io_requests++;
    }
    DELETE(requests, &request);
    return 0;
}
