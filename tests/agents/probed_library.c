/* NCCL's public functions, or with CUDART those of the CUDA runtime, doing nothing but what the tests of the tracer
 * need: a result that can be told from the arguments, communicators whose addresses are used again, and splits that
 * finish late. */
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef int ncclResult_t;
typedef struct comm *ncclComm_t;
typedef void *stream_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

long probed_delay_ns, probed_result;

/* A count of 13 is refused, as NCCL refuses invalid arguments. */
static ncclResult_t work(size_t count)
{
    if (probed_delay_ns)
        nanosleep(&(struct timespec){.tv_nsec = probed_delay_ns}, NULL);
    return count == 13 ? 4 : probed_result;
}

#ifdef CUDART

int cudaStreamSynchronize(stream_t stream)
{
    (void)stream;
    return work(0);
}

int cudaEventSynchronize(void *event)
{
    (void)event;
    return work(0);
}

int cudaDeviceSynchronize(void)
{
    return work(0);
}

int cudaLaunchKernel(void)
{
    return work(0);
}

#else

struct comm {
    int is_used;
    char room[60];
};

#define COMMS 64
static struct comm comms[COMMS];
static ncclComm_t *unfinished[COMMS];
static int n_unfinished, depth;

static ncclComm_t take(void)
{
    for (int i = 0; i < COMMS; i++)
        if (!comms[i].is_used) {
            comms[i].is_used = 1;
            return &comms[i];
        }
    return NULL;
}

#define TWO const void *from, void *to, size_t count, int type
#define IGNORE (void)from, (void)to, (void)type, (void)comm, (void)stream

ncclResult_t ncclAllReduce(TWO, int op, ncclComm_t comm, stream_t stream)
{
    IGNORE, (void)op;
    return work(count);
}

ncclResult_t ncclAllReduceConfig(TWO, int op, ncclComm_t comm, stream_t stream, const void *config)
{
    (void)config;
    return ncclAllReduce(from, to, count, type, op, comm, stream);
}

ncclResult_t ncclReduceScatter(TWO, int op, ncclComm_t comm, stream_t stream)
{
    IGNORE, (void)op;
    return work(count);
}

ncclResult_t ncclAllGather(TWO, ncclComm_t comm, stream_t stream)
{
    IGNORE;
    return work(count);
}

ncclResult_t ncclAlltoAll(TWO, ncclComm_t comm, stream_t stream)
{
    IGNORE;
    return work(count);
}

ncclResult_t ncclBroadcast(TWO, int root, ncclComm_t comm, stream_t stream)
{
    IGNORE, (void)root;
    return work(count);
}

ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t comm, stream_t stream)
{
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclGather(TWO, int root, ncclComm_t comm, stream_t stream)
{
    IGNORE, (void)root;
    return work(count);
}

ncclResult_t ncclReduce(TWO, int op, int root, ncclComm_t comm, stream_t stream)
{
    IGNORE, (void)op, (void)root;
    return work(count);
}

ncclResult_t ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t comm, stream_t stream)
{
    (void)from, (void)type, (void)peer, (void)comm, (void)stream;
    return work(count);
}

ncclResult_t ncclRecv(void *to, size_t count, int type, int peer, ncclComm_t comm, stream_t stream)
{
    (void)to, (void)type, (void)peer, (void)comm, (void)stream;
    return work(count);
}

void probed_finish(void)
{
    while (n_unfinished)
        *unfinished[--n_unfinished] = take();
}

ncclResult_t ncclGroupStart(void)
{
    depth++;
    return work(0);
}

ncclResult_t ncclGroupEnd(void)
{
    if (--depth == 0)
        probed_finish();
    return 0;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank)
{
    (void)id;
    *comm = rank < n_ranks ? take() : NULL;
    return *comm ? 0 : 4;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank, void *config)
{
    (void)config;
    return ncclCommInitRank(comm, n_ranks, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int n_ranks, int rank, int n_ids, ncclUniqueId *ids, void *config)
{
    (void)n_ids, (void)config;
    return ncclCommInitRank(comm, n_ranks, ids[0], rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t *all, int n_devices, const int *devices)
{
    (void)devices;
    for (int i = 0; i < n_devices; i++)
        all[i] = take();
    return 0;
}

/* In a group, the new communicator is there when the group ends; with a key of 13, when somebody finishes it. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, void *config)
{
    (void)comm, (void)config;
    *made = NULL;
    if (color < 0)
        return 0;
    if (depth || key == 13)
        unfinished[n_unfinished++] = made;
    else
        *made = take();
    return key == 13 ? 7 : 0;
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *left_out, int n, ncclComm_t *made, void *config, int flags)
{
    (void)left_out, (void)n, (void)flags;
    return ncclCommSplit(comm, 0, 0, made, config);
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int n_ranks, const ncclUniqueId *id, int rank, ncclComm_t *made, void *config)
{
    (void)comm, (void)n_ranks, (void)id, (void)rank, (void)config;
    *made = take();
    return 0;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    comm->is_used = 0;
    return 0;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    comm->is_used = 0;
    return 0;
}

double probed_ns_per_call(long n, size_t step)
{
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < n; i++)
        ncclAllReduce(0, 0, 1 + i * step, 7, 0, &comms[0], 0);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / n;
}

#endif
