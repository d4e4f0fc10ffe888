// The load generator of the benchmarks: one thread, one epoll loop, HTTP/1.1, RESP (Redis) and the protocol of NATS.
//
// It reads a plan from stdin (plan.c), carries it out, and prints the figures as one line of JSON (figures.c).
// A wrong answer, a closed connection or a stall ends it at once: a message on stderr, exit code 1, no figures.
//
//   plan.c      what to do: the format of the plan
//   answers.c   where an answer ends, whether it is an error, how many records it has
//   lines.c     connections, and requests in which numbers vary
//   figures.c   the clock, percentiles, processor time of the servers, the output
//   requests.c  N connections, each with one request in flight, as fast as possible or at a pace
//   queue.c     producers and workers of a queue
//   watch.c     one writer and N connections that receive everything it writes
//   null.c      a server that answers at once, to measure the generator itself
#pragma once

#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SECOND_NS 1000000000LL
#define STEPS_MAX 4
#define CLIENTS_MAX 65536
#define REQUEST_BYTES_MAX (64 << 20)
#define SLOTS_MAX 65536
#define PIDS_MAX 64
#define ROLE_BYTES 16
#define HEAD_BYTES_MAX 8192       // head of an HTTP response, or a line of the other protocols
#define KEPT_BYTES_MAX (1 << 20)  // an answer whose text is needed
#define RECEIVE_BYTES (256 << 10)
#define STALLED_S 30
#define LONGEST_S 20  // wait this much longer for a first answer
#define MARK '~'      // stands once in each record, and nowhere else on the wire: records are counted by it

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *allocate(size_t bytes);

// ---- answers.c

typedef enum { HTTP, RESP, NATS } Protocol;

// What has come of the answers to one connection.
typedef struct {
    Protocol protocol;
    int64_t skip;     // bytes of a body or value that are still to come
    int64_t pending;  // RESP: elements that the current reply still lacks
    int status;       // NATS: of the last message that had one
    long replies;     // complete, since the last reset
    long marks;       // records in them
    int head_len;
    char head[HEAD_BYTES_MAX + 1];
    bool keeps;  // keep the text of the answer
    char *kept;
    size_t kept_len, kept_room;
} Answers;

void answers_reset(Answers *answers);
void answers_feed(Answers *answers, const char *data, size_t size);
long count_marks(const char *data, size_t size);

// ---- plan.c

typedef enum { CLIENT_SLOT, TOPIC_SLOT, CURSOR_SLOT, NEXT_SLOT } SlotKind;

// A place in a request where a number of fixed width goes, so that lengths do not change.
typedef struct {
    SlotKind kind;
    size_t at;
    int width;
    char pad;
} Slot;

typedef struct {
    char *text;
    size_t length;
    Slot *slots;
    int slot_count;
    long replies;  // answers that complete the request; 0: none is expected
    long records;  // written or read by it
    long marks;    // records that its answer must have; -1: not checked
    bool timed;    // its latency counts
} Step;

typedef struct {
    char mode[16];
    char host[64];
    int port;
    Protocol protocol;
    int clients, first_number;
    double seconds, warm_up_s;
    int64_t every_ns;  // 0: as fast as possible
    long most;         // requests; 0: unlimited. Of the null server: bytes of a request
    int topics;        // {topic} goes through 0 … topics - 1
    uint64_t cursor_first, cursor_end;  // {cursor} begins at the first, and again at or after the end; end 0: never
    Step steps[STEPS_MAX];
    int step_count;
    Step hello;  // NATS: sent once, answered by one PONG
    struct {
        char role[ROLE_BYTES];
        int pid;
    } pids[PIDS_MAX];
    int pid_count;
    // queue
    int producers;
    long waiting_max, held;
    char queue[64], group[64];
    // watch
    char shape[16];
    bool polls;         // watchers ask again after each answer, with steps[2]
    char opened[64];    // received by a watcher when it is ready; empty: at once
    int64_t pause_ns;   // before each write
    Step *watchers;     // the first request of each watcher
    int watcher_count;
} Plan;

Plan *plan_read(void);

// ---- lines.c

typedef struct {
    int fd, number;
    Answers answers;
    char *texts[STEPS_MAX];  // the requests with this connection's numbers
    const char *sending;     // what the socket had no room for
    size_t sending_len;
    int step;
    bool in_flight, writable_wanted;
    uint64_t cursor, next;
    int topic;
    int64_t sent_ns, due_ns;
    void *owner;
} Line;

extern int poll_fd;

void line_open(Line *line, const Plan *plan, int number);
void line_send(Line *line, const char *text, size_t length);
void line_flush(Line *line);  // send the rest, when the socket has room again
void line_ask(Line *line, const Plan *plan);  // send the request of its step, with fresh numbers
size_t line_receive(Line *line, const char **data);  // 0: nothing came
void line_await(Line *line, const char *text);       // receive until this text has come

// ---- figures.c

int64_t now_ns(void);
void latency_keep(int which, int64_t ns);
void figures_begin(const Plan *plan);  // start to count: the warm-up is over
void figures_end(const Plan *plan);
double figures_seconds(void);
long latency_count(int which);
void print_begin(void);
void print_number(const char *name, double value, int digits);
void print_latencies(int which, const char *prefix);
void print_end(const Plan *plan, double count);

void run_requests(const Plan *plan);
void run_queue(const Plan *plan);
void run_watch(const Plan *plan);
_Noreturn void run_null(const Plan *plan);
