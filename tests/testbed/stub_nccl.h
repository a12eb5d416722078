/* The stub NCCL from inside: communicators, what is asked of them, and the three parts that do it.
 *
 * stub_nccl.c            the public functions, groups, communicators' creation and end
 * stub_nccl_wire.c       finding the other ranks, and moving bytes to and from them
 * stub_nccl_inspector.c  the files that NCCL's Inspector plug-in writes
 */
#ifndef STUB_NCCL_H
#define STUB_NCCL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
} ncclResult_t;

enum { UNIQUE_ID_BYTES = 128, MAX_RANKS = 64, NAME_BYTES = 128 };

/* Functions as NCCL numbers its counters: one per function and communicator. */
enum function { BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SEND, RECV, N_FUNCTIONS };

struct inspected;

struct ncclComm {
  uint64_t magic;
  int rank, size, n_nodes;
  uint64_t hash;
  char name[NAME_BYTES];
  bool is_blocking;
  int n_children;
  uint64_t sequence[N_FUNCTIONS]; /* of the next call of each function */
  _Atomic int state;              /* an ncclResult_t: in progress, success, or why nothing works any more */
  _Atomic bool is_aborted;
  int listener, ring_out, ring_in;
  int out[MAX_RANKS], in[MAX_RANKS]; /* connections for send and receive, made when first needed; -1 before */
  struct inspected *inspected;       /* NULL where Inspector is off */
};

struct operation {
  enum function function;
  struct ncclComm *comm;
  uint64_t bytes; /* count x size of the data type, as the caller counts them */
  int peer;       /* or root */
  uint64_t sequence;
  uint64_t called_ns; /* when the host asked for it */
};

/* ---- stub_nccl_wire.c ---- */

/* Publish this rank, find all others, and connect the ring. */
ncclResult_t wire_open(struct ncclComm *comm);
void wire_close(struct ncclComm *comm);

/* The colour and key of every rank of the parent, of its n-th child. */
ncclResult_t wire_exchange_split(struct ncclComm *parent, int child, int color, int key, int colors[], int keys[]);

/* Carry out one collective, or sends and receives all at once. */
ncclResult_t wire_collective(const struct operation *operation);
ncclResult_t wire_exchange(const struct operation operations[], int count);

/* ---- stub_nccl_inspector.c ---- */

void inspector_open(struct ncclComm *comm);
void inspector_close(struct ncclComm *comm);
void inspector_note(const struct operation *operation, uint64_t start_ns, uint64_t end_ns);

#endif
