/* Bytes between ranks: over TCP, around a ring for collectives and directly for send and receive.
 *
 * The amounts and the routes are NCCL's of its ring algorithm, so a slow link slows exactly the rings and pairs over it.
 * The contents are not: nothing is reduced, and receive buffers stay as they were.
 *
 * Ranks find each other through files in $STUB_NCCL_DIR, which all of them see, "<communicator>.<rank>" with address,
 * port and node. $STUB_NCCL_ADDRESS is the own address (127.0.0.1 where unset), $STUB_NCCL_NODE the name of the node.
 */
#define _GNU_SOURCE
#include "stub_nccl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
  PIECE_BYTES = 1 << 18,
  BUFFER_BYTES = 1 << 17, /* small, so that a sender feels a slow link and does not run ahead of it */
  RELAY_BYTES = 1 << 15,
  WAIT_MS = 200,          /* between looks whether the communicator was aborted */
  RENDEZVOUS_MS = 60000,
  CHAIN_BYTES = 4096, /* below it a reduction goes along the ring and back once: latency counts, not bandwidth */
};

struct transfer {
  int socket;
  bool is_outgoing;
  uint64_t left;
};

struct member {
  char address[64];
  int port;
  char node[64];
};

static char nothing[PIECE_BYTES];

/* ---- meeting in a directory ---- */

static void path_of(char *path, size_t size, const char *name) {
  const char *directory = getenv("STUB_NCCL_DIR");
  snprintf(path, size, "%s/%s", directory ? directory : "/dev/shm", name);
}

static bool publish(const char *name, const char *text) {
  char path[512], draft[640];
  path_of(path, sizeof path, name);
  snprintf(draft, sizeof draft, "%s.%d.draft", path, (int)getpid());
  FILE *file = fopen(draft, "we");
  if (!file) return false;
  fputs(text, file);
  return fclose(file) == 0 && rename(draft, path) == 0;
}

static bool await(const struct ncclComm *comm, const char *name, char *text, size_t size) {
  char path[512];
  path_of(path, sizeof path, name);
  for (int waited_ms = 0; waited_ms < RENDEZVOUS_MS && !comm->is_aborted; waited_ms++) {
    FILE *file = fopen(path, "re");
    if (file) {
      size_t length = fread(text, 1, size - 1, file);
      text[length] = 0;
      fclose(file);
      return true;
    }
    nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
  }
  return false;
}

static void member_name(char *name, size_t size, const struct ncclComm *comm, int rank) {
  snprintf(name, size, "%016lx.%d", (unsigned long)comm->hash, rank);
}

static bool find_member(const struct ncclComm *comm, int rank, struct member *member) {
  char name[64], text[256];
  member_name(name, sizeof name, comm, rank);
  return await(comm, name, text, sizeof text) &&
         sscanf(text, "%63s %d %63s", member->address, &member->port, member->node) == 3;
}

static int count_nodes(const struct ncclComm *comm) {
  static __thread struct member members[MAX_RANKS];
  int nodes = 0;
  for (int i = 0; i < comm->size; i++) {
    if (!find_member(comm, i, &members[i])) return 0;
    int j = 0;
    while (j < i && strcmp(members[j].node, members[i].node) != 0) j++;
    if (j == i) nodes++;
  }
  return nodes;
}

ncclResult_t wire_exchange_split(struct ncclComm *parent, int child, int color, int key, int colors[], int keys[]) {
  char name[96], text[64];
  snprintf(name, sizeof name, "%016lx.child%d.%d", (unsigned long)parent->hash, child, parent->rank);
  snprintf(text, sizeof text, "%d %d\n", color, key);
  if (!publish(name, text)) return ncclSystemError;
  for (int i = 0; i < parent->size; i++) {
    snprintf(name, sizeof name, "%016lx.child%d.%d", (unsigned long)parent->hash, child, i);
    if (!await(parent, name, text, sizeof text) || sscanf(text, "%d %d", &colors[i], &keys[i]) != 2)
      return ncclSystemError;
  }
  return ncclSuccess;
}

/* ---- connections ---- */

static void limit_buffers(int socket) {
  int bytes = BUFFER_BYTES, yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

static bool listen_and_publish(struct ncclComm *comm) {
  const char *address = getenv("STUB_NCCL_ADDRESS");
  const char *node = getenv("STUB_NCCL_NODE");
  struct sockaddr_in own = { .sin_family = AF_INET };
  socklen_t length = sizeof own;
  char name[64], text[256];
  if (!address) address = "127.0.0.1";
  own.sin_addr.s_addr = inet_addr(address);
  comm->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (comm->listener < 0) return false;
  limit_buffers(comm->listener);
  if (bind(comm->listener, (struct sockaddr *)&own, sizeof own) != 0) return false;
  if (listen(comm->listener, 2 * MAX_RANKS) != 0) return false;
  if (getsockname(comm->listener, (struct sockaddr *)&own, &length) != 0) return false;
  fcntl(comm->listener, F_SETFL, O_NONBLOCK);
  member_name(name, sizeof name, comm, comm->rank);
  snprintf(text, sizeof text, "%s %d %s\n", address, ntohs(own.sin_port), node ? node : "node");
  return publish(name, text);
}

/* The first thing said on a connection is who calls, and whether for the ring: rank + MAX_RANKS means the ring. */
static int connect_to(const struct ncclComm *comm, int rank, bool is_ring) {
  struct member member;
  int32_t hello = comm->rank + (is_ring ? MAX_RANKS : 0);
  if (!find_member(comm, rank, &member)) return -1;
  struct sockaddr_in other = { .sin_family = AF_INET, .sin_port = htons((uint16_t)member.port) };
  other.sin_addr.s_addr = inet_addr(member.address);
  int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0) return -1;
  limit_buffers(connection);
  if (connect(connection, (struct sockaddr *)&other, sizeof other) != 0 ||
      send(connection, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    close(connection);
    return -1;
  }
  fcntl(connection, F_SETFL, O_NONBLOCK);
  return connection;
}

/* Accept callers until the wanted one is there; the others wait in their places. */
static int await_caller(struct ncclComm *comm, int *place) {
  struct pollfd waiting = { .fd = comm->listener, .events = POLLIN };
  while (*place < 0 && !comm->is_aborted) {
    int32_t hello;
    if (poll(&waiting, 1, WAIT_MS) <= 0) continue;
    int connection = accept4(comm->listener, NULL, NULL, SOCK_CLOEXEC);
    if (connection < 0) continue;
    if (recv(connection, &hello, sizeof hello, MSG_WAITALL) != sizeof hello || hello < 0 || hello >= 2 * MAX_RANKS) {
      close(connection);
      continue;
    }
    fcntl(connection, F_SETFL, O_NONBLOCK);
    if (hello >= MAX_RANKS) comm->ring_in = connection;
    else comm->in[hello] = connection;
  }
  return *place;
}

ncclResult_t wire_open(struct ncclComm *comm) {
  comm->ring_in = comm->ring_out = -1;
  for (int i = 0; i < MAX_RANKS; i++) comm->in[i] = comm->out[i] = -1;
  if (!listen_and_publish(comm)) return ncclSystemError;
  comm->n_nodes = count_nodes(comm);
  if (comm->n_nodes == 0) return ncclSystemError;
  if (comm->size == 1) return ncclSuccess;
  comm->ring_out = connect_to(comm, (comm->rank + 1) % comm->size, true);
  if (comm->ring_out < 0 || await_caller(comm, &comm->ring_in) < 0) return ncclSystemError;
  return ncclSuccess;
}

static void close_one(int *socket) {
  if (*socket >= 0) close(*socket);
  *socket = -1;
}

void wire_close(struct ncclComm *comm) {
  char name[64], path[512];
  close_one(&comm->ring_out);
  close_one(&comm->ring_in);
  close_one(&comm->listener);
  for (int i = 0; i < MAX_RANKS; i++) {
    close_one(&comm->out[i]);
    close_one(&comm->in[i]);
  }
  member_name(name, sizeof name, comm, comm->rank);
  path_of(path, sizeof path, name);
  unlink(path);
}

/* ---- transfers ---- */

/* Move what can be moved now. Negative: the other end is gone. */
static ssize_t advance(struct transfer *transfer) {
  size_t piece = transfer->left < PIECE_BYTES ? (size_t)transfer->left : PIECE_BYTES;
  ssize_t moved = transfer->is_outgoing ? send(transfer->socket, nothing, piece, MSG_NOSIGNAL)
                                        : recv(transfer->socket, NULL, piece, MSG_TRUNC); /* counted, not copied */
  if (moved > 0) {
    transfer->left -= (uint64_t)moved;
    return moved;
  }
  if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  return -1;
}

static ncclResult_t move(struct ncclComm *comm, struct transfer transfers[], int count) {
  struct pollfd waiting[2 * MAX_RANKS];
  for (;;) {
    int n_waiting = 0;
    bool has_moved = false;
    for (int i = 0; i < count; i++) {
      if (transfers[i].left == 0) continue;
      ssize_t moved = advance(&transfers[i]);
      if (moved < 0) return ncclRemoteError;
      has_moved |= moved > 0;
      if (transfers[i].left == 0) continue;
      short events = transfers[i].is_outgoing ? POLLOUT : POLLIN;
      waiting[n_waiting++] = (struct pollfd){ .fd = transfers[i].socket, .events = events };
    }
    if (n_waiting == 0) return ncclSuccess;
    if (has_moved) continue;
    poll(waiting, (nfds_t)n_waiting, WAIT_MS);
    if (comm->is_aborted) return ncclRemoteError;
  }
}

static ncclResult_t around_the_ring(struct ncclComm *comm, int steps, uint64_t piece) {
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < steps && result == ncclSuccess; i++) {
    struct transfer both[2] = { { comm->ring_out, true, piece }, { comm->ring_in, false, piece } };
    result = move(comm, both, 2);
  }
  return result;
}

/* From the first to the last along the ring, in pieces; the first only sends, the last only receives. */
static ncclResult_t along_the_ring(struct ncclComm *comm, int first, uint64_t bytes) {
  int last = (first + comm->size - 1) % comm->size;
  ncclResult_t result = ncclSuccess;
  while (bytes > 0 && result == ncclSuccess) {
    uint64_t piece = bytes < RELAY_BYTES ? bytes : RELAY_BYTES;
    struct transfer in = { comm->ring_in, false, piece }, out = { comm->ring_out, true, piece };
    if (comm->rank != first) result = move(comm, &in, 1);
    if (comm->rank != last && result == ncclSuccess) result = move(comm, &out, 1);
    bytes -= piece;
  }
  return result;
}

ncclResult_t wire_collective(const struct operation *operation) {
  struct ncclComm *comm = operation->comm;
  int size = comm->size, last = size - 1;
  uint64_t bytes = operation->bytes;
  if (size == 1 || bytes == 0) return ncclSuccess;
  switch (operation->function) {
    case ALL_REDUCE: {
      if (bytes >= CHAIN_BYTES) return around_the_ring(comm, 2 * last, (bytes + (uint64_t)last) / (uint64_t)size);
      ncclResult_t result = along_the_ring(comm, 0, bytes);
      return result == ncclSuccess ? along_the_ring(comm, last, bytes) : result;
    }
    case REDUCE_SCATTER:
    case ALL_GATHER: return around_the_ring(comm, last, bytes); /* bytes are those of one rank */
    case BROADCAST: return along_the_ring(comm, operation->peer, bytes);
    case REDUCE: return along_the_ring(comm, (operation->peer + 1) % size, bytes);
    default: return ncclInternalError;
  }
}

static ncclResult_t prepare(const struct operation *operation, struct transfer *transfer) {
  struct ncclComm *comm = operation->comm;
  int peer = operation->peer;
  *transfer = (struct transfer){ -1, operation->function == SEND, operation->bytes };
  if (peer == comm->rank) {
    transfer->left = 0; /* from memory to memory */
  } else if (transfer->is_outgoing) {
    if (comm->out[peer] < 0) comm->out[peer] = connect_to(comm, peer, false);
    transfer->socket = comm->out[peer];
  } else {
    transfer->socket = await_caller(comm, &comm->in[peer]);
  }
  return transfer->socket >= 0 || transfer->left == 0 ? ncclSuccess : ncclRemoteError;
}

ncclResult_t wire_exchange(const struct operation operations[], int count) {
  struct transfer transfers[2 * MAX_RANKS];
  /* All that call are served before anyone is waited for, or two ranks would wait for each other's call. */
  for (int outgoing = 1; outgoing >= 0; outgoing--)
    for (int i = 0; i < count; i++)
      if ((operations[i].function == SEND) == (outgoing == 1)) {
        ncclResult_t result = prepare(&operations[i], &transfers[i]);
        if (result != ncclSuccess) return result;
      }
  return move(operations[0].comm, transfers, count);
}
