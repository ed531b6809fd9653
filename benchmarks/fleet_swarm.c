/* Thousands of agents in one thread: each a connection, a gRPC stream and a spool of its own.
 *
 * Load that costs little: what agents tell is made once (fleet_swarm.py), numbers and times are
 * written into it. Reports are not kept but made again: an agent tells one each period, so that the
 * number of one says what it held. As much of HTTP/2 as that needs. Built by fleet_swarm.py; with
 * WITH_TLS each agent shows the certificate NODE.crt, NODE.key of a folder.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#endif

enum { DATA = 0, HEADERS = 1, RST = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW = 8 };
enum { AWAY, OPENING, WELCOME };
#define FRAME_MAX 16384
#define DEFAULT_WINDOW 65535
#define FIRST_BACKOFF_S 0.2
#define BACKOFF_MAX_S 10.0
#define OPENED_AT_ONCE 64 /* connections between two looks at the others */
#define PROBE_PERIOD_S 0.5
#define NUM_PROBES 16
#define MAX_WAITS 65536
#define STEP_VARIANTS 4

/* Bytes of a message; `times`: where doubles of the time stand, `numbers`: varints of four bytes. */
typedef struct {
    uint8_t *bytes;
    int32_t size, num_times, num_numbers;
    int32_t *times, *numbers;
} Part;

typedef struct {
    Part hello, greeting, devices, step[STEP_VARIANTS], loss;
    int fd, state, is_broken, is_polled_out, waits_in; /* waits_in: to be read from first, by TLS */
    void *tls;
    double phase_s, first_s, opened_s, backoff_s, retry_s;
    uint64_t sequence, settled, sent, goal; /* made; acknowledged; sent on this connection */
    uint64_t loss_at; /* the report that has `loss`; 0: none */
    int64_t connection_window, stream_window, initial_window;
    uint8_t *in, *said, *out; /* frames, messages of the server, what could not be written yet */
    int32_t in_size, in_room, said_size, said_room, out_size, out_room;
} Agent;

typedef struct {
    int64_t made, acknowledged, broken, refused, commands, num_welcome;
    int64_t num_waits, num_probes;
    double late_s;
    double waits[MAX_WAITS], probes[MAX_WAITS];
} Counts;

typedef struct {
    Agent *agents, probes[NUM_PROBES];
    int32_t num, step_every, device_every;
    double period_s, spread_s, lap_s, next_probe_s;
    int32_t at, probe, poll; /* whose turn it is; the probe that is open, -1: none */
    int64_t probes_made;
    uint64_t random;
    Part kernel;
    uint8_t *opening;
    int32_t opening_size;
    int32_t *heap, heap_size; /* agents that are away, the next to try first */
    struct sockaddr_in address;
    void *tls; /* what all connections share; none: plaintext */
    const char *folder;
    Counts counts;
} Swarm;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double uniform(Swarm *s) {
    s->random ^= s->random << 13, s->random ^= s->random >> 7, s->random ^= s->random << 17;
    return (s->random >> 11) * (1.0 / 9007199254740992.0);
}

static void append(uint8_t **to, int32_t *size, int32_t *room, const void *data, int32_t count) {
    if (*size + count > *room) {
        *room = (*size + count) * 2;
        *to = realloc(*to, *room);
        if (!*to) abort();
    }
    memcpy(*to + *size, data, count);
    *size += count;
}

/* --- who is away and tries again: a heap by time --- */

static void sift(Swarm *s, int at) {
    int32_t *heap = s->heap, moved = heap[at];
    while (at && s->agents[heap[(at - 1) / 2]].retry_s > s->agents[moved].retry_s)
        heap[at] = heap[(at - 1) / 2], at = (at - 1) / 2;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= s->heap_size) break;
        if (child + 1 < s->heap_size &&
            s->agents[heap[child + 1]].retry_s < s->agents[heap[child]].retry_s)
            child++;
        if (s->agents[heap[child]].retry_s >= s->agents[moved].retry_s) break;
        heap[at] = heap[child], at = child;
    }
    heap[at] = moved;
}

static void try_at(Swarm *s, int number, double at_s) {
    s->agents[number].retry_s = at_s;
    s->heap[s->heap_size++] = number;
    sift(s, s->heap_size - 1);
}

static int next_try(Swarm *s) {
    int first = s->heap[0];
    s->heap[0] = s->heap[--s->heap_size];
    if (s->heap_size) sift(s, 0);
    return first;
}

/* --- one connection --- */

static int index_of(Swarm *s, Agent *a) { /* of a probe: beyond all agents */
    return a >= s->probes && a < s->probes + NUM_PROBES ? s->num + (int)(a - s->probes)
                                                        : (int)(a - s->agents);
}

static void watch(Swarm *s, Agent *a, int op) {
    struct epoll_event e = {.events = EPOLLIN | (a->is_polled_out ? EPOLLOUT : 0)};
    e.data.u32 = index_of(s, a);
    epoll_ctl(s->poll, op, a->fd, &e);
}

#ifdef WITH_TLS
static void begin_tls(Swarm *s, Agent *a) {
    char crt[512], key[512], name[32];
    int number = index_of(s, a);
    snprintf(name, sizeof name, number < s->num ? "node-%05d" : "probe-%d",
             number < s->num ? number : number - s->num);
    snprintf(crt, sizeof crt, "%s/%s.crt", s->folder, name);
    snprintf(key, sizeof key, "%s/%s.key", s->folder, name);
    SSL *tls = SSL_new(s->tls);
    if (SSL_use_certificate_file(tls, crt, SSL_FILETYPE_PEM) != 1) abort();
    if (SSL_use_PrivateKey_file(tls, key, SSL_FILETYPE_PEM) != 1) abort();
    SSL_set_fd(tls, a->fd);
    SSL_set_connect_state(tls);
    a->tls = tls;
}

static ssize_t tls_result(Agent *a, int done) {
    int why = SSL_get_error(a->tls, done);
    a->waits_in = why == SSL_ERROR_WANT_READ;
    errno = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? EAGAIN : EPIPE;
    return -1;
}

void swarm_tls(Swarm *s, const char *authority, const char *folder) {
    SSL_CTX *tls = SSL_CTX_new(TLS_client_method());
    if (SSL_CTX_load_verify_locations(tls, authority, 0) != 1) abort();
    SSL_CTX_set_verify(tls, SSL_VERIFY_PEER, 0);
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_alpn_protos(tls, (const uint8_t *)"\x02h2", 3);
    s->tls = tls, s->folder = strdup(folder);
}
#endif

static ssize_t put(Agent *a, const uint8_t *data, int32_t size) {
#ifdef WITH_TLS
    if (a->tls) {
        ERR_clear_error();
        a->waits_in = 0;
        int done = SSL_write(a->tls, data, size);
        return done > 0 ? done : tls_result(a, done);
    }
#endif
    return send(a->fd, data, size, MSG_NOSIGNAL);
}

static ssize_t get(Agent *a, uint8_t *data, int32_t room) {
#ifdef WITH_TLS
    if (a->tls) {
        ERR_clear_error();
        int got = 0, done;
        do { /* whole records wait inside, where no poll sees them */
            done = SSL_read(a->tls, data + got, room - got);
            if (done > 0) got += done;
        } while (done > 0 && got < room && SSL_pending(a->tls));
        if (got) return got;
        int waited = a->waits_in;
        ssize_t result = tls_result(a, done);
        a->waits_in = waited;
        return result;
    }
#endif
    return recv(a->fd, data, room, 0);
}

static void forget(Swarm *s, Agent *a) {
#ifdef WITH_TLS
    if (a->tls) SSL_free(a->tls), a->tls = 0;
#endif
    if (a->fd >= 0) close(a->fd);
    if (a->state == WELCOME && index_of(s, a) < s->num) s->counts.num_welcome--;
    a->fd = -1, a->state = AWAY;
    a->in_size = a->said_size = a->out_size = 0;
}

static void lose(Swarm *s, Agent *a, double now_s) {
    if (a->state == AWAY) return;
    int was_welcome = a->state == WELCOME;
    if (!was_welcome) (*(a->is_broken ? &s->counts.broken : &s->counts.refused))++;
    forget(s, a);
    int number = index_of(s, a);
    if (number >= s->num) {
        s->probe = -1;
        return;
    }
    double most_s = s->spread_s / 3 > BACKOFF_MAX_S ? s->spread_s / 3 : BACKOFF_MAX_S;
    double wait_s = was_welcome && s->spread_s > a->backoff_s ? s->spread_s : a->backoff_s;
    try_at(s, number, now_s + uniform(s) * wait_s);
    a->backoff_s = a->backoff_s * 2 > most_s ? most_s : a->backoff_s * 2;
}

static void write_out(Swarm *s, Agent *a, const uint8_t *data, int32_t size, double now_s) {
    if (a->out_size && size) {
        append(&a->out, &a->out_size, &a->out_room, data, size);
        return; /* behind what waits; epoll says when */
    }
    if (!size) data = a->out, size = a->out_size;
    ssize_t sent = put(a, data, size);
    if (sent < 0) {
        if (errno != EAGAIN && errno != ENOTCONN) {
            lose(s, a, now_s);
            return;
        }
        sent = 0;
    }
    if (data == a->out) {
        memmove(a->out, a->out + sent, size - sent);
        a->out_size = size - sent;
    } else if (sent < size) {
        append(&a->out, &a->out_size, &a->out_room, data + sent, size - sent);
    }
    int is_polled_out = a->out_size && !a->waits_in;
    if (is_polled_out != a->is_polled_out) {
        a->is_polled_out = is_polled_out;
        watch(s, a, EPOLL_CTL_MOD);
    }
}

static void frame_head(uint8_t *at, int size, int kind, int flags, int stream) {
    at[0] = size >> 16, at[1] = size >> 8, at[2] = size, at[3] = kind, at[4] = flags;
    at[5] = at[6] = at[7] = 0, at[8] = stream;
}

static int put_varint(uint8_t *at, uint64_t value) {
    int size = 0;
    while (value >= 0x80) at[size++] = value | 0x80, value >>= 7;
    at[size++] = value;
    return size;
}

static int put_part(uint8_t *at, const Part *part, double time_s, uint32_t number) {
    memcpy(at, part->bytes, part->size);
    for (int i = 0; i < part->num_times; i++) memcpy(at + part->times[i], &time_s, 8);
    for (int i = 0; i < part->num_numbers; i++) {
        uint8_t *to = at + part->numbers[i]; /* four bytes, however small it is */
        to[0] = number | 0x80, to[1] = number >> 7 | 0x80, to[2] = number >> 14 | 0x80;
        to[3] = number >> 21 & 0x7F;
    }
    return part->size;
}

/* One report as a frame of data; what the n-th tells depends on n alone. 0: the greeting. */
static int make_report(Swarm *s, Agent *a, uint64_t n, int is_greeting, double now_s, uint8_t *to) {
    uint8_t body[FRAME_MAX], head[16];
    double made_s = is_greeting ? now_s : a->first_s + (n - 1) * s->period_s;
    int size = put_part(body, &s->kernel, made_s, 0), head_size = 0, at;
    if (is_greeting || n % s->device_every == 0)
        size += put_part(body + size, &a->devices, made_s, 0);
    if (is_greeting) {
        size += put_part(body + size, &a->greeting, made_s, 0);
    } else if (n % s->step_every == 0) {
        uint32_t step = n / s->step_every - 1;
        size += put_part(body + size, &a->step[step % STEP_VARIANTS], made_s, step);
    }
    if (!is_greeting && n == a->loss_at) size += put_part(body + size, &a->loss, made_s, 0);
    head[head_size++] = 0x08;
    head_size += put_varint(head + head_size, n);
    head[head_size++] = 0x11;
    memcpy(head + head_size, &now_s, 8);
    head_size += 8;
    at = 14;
    to[at++] = 0x12; /* AttachRequest.report */
    at += put_varint(to + at, head_size + size);
    memcpy(to + at, head, head_size), at += head_size;
    memcpy(to + at, body, size), at += size;
    to[9] = 0, to[10] = to[11] = 0, to[12] = (at - 14) >> 8, to[13] = at - 14;
    frame_head(to, at - 9, DATA, 0, 1);
    return at;
}

/* What is due and has room in the server's windows. */
static void speak(Swarm *s, Agent *a, double now_s) {
    uint8_t packet[4 * FRAME_MAX];
    int size = 0;
    while (a->state == WELCOME && a->sent < a->sequence) {
        int made = make_report(s, a, a->sent + 1, 0, now_s, packet + size);
        if (made - 9 > a->connection_window || made - 9 > a->stream_window) break;
        a->connection_window -= made - 9, a->stream_window -= made - 9;
        a->sent++, size += made;
        if (size > 3 * FRAME_MAX) write_out(s, a, packet, size, now_s), size = 0;
    }
    if (size && a->state == WELCOME) write_out(s, a, packet, size, now_s);
}

static void open_one(Swarm *s, Agent *a, double now_s) {
    uint8_t first[4096];
    int one = 1, size = s->opening_size, told = a->hello.size;
    a->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (a->fd < 0) abort();
    setsockopt(a->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connect(a->fd, (struct sockaddr *)&s->address, sizeof s->address);
    a->state = OPENING, a->opened_s = now_s, a->is_broken = a->waits_in = 0;
#ifdef WITH_TLS
    if (s->tls) begin_tls(s, a);
#endif
    a->connection_window = a->stream_window = a->initial_window = DEFAULT_WINDOW;
    memcpy(first, s->opening, size);
    frame_head(first + size, told + 5, DATA, 0, 1);
    first[size + 9] = first[size + 10] = first[size + 11] = 0;
    first[size + 12] = told >> 8, first[size + 13] = told;
    memcpy(first + size + 14, a->hello.bytes, told);
    a->connection_window -= told + 5, a->stream_window -= told + 5;
    append(&a->out, &a->out_size, &a->out_room, first, size + 14 + told);
    a->is_polled_out = 1;
    watch(s, a, EPOLL_CTL_ADD);
}

static uint64_t varint_at(const uint8_t **at, const uint8_t *end) {
    uint64_t value = 0;
    for (int shift = 0; *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) break;
    }
    return value;
}

static void welcomed(Swarm *s, Agent *a, double now_s) {
    Counts *c = &s->counts;
    uint8_t packet[2 * FRAME_MAX];
    if (index_of(s, a) >= s->num) {
        if (c->num_probes < MAX_WAITS) c->probes[c->num_probes++] = now_s - a->opened_s;
        forget(s, a);
        s->probe = -1;
        return;
    }
    if (c->num_waits < MAX_WAITS) c->waits[c->num_waits++] = now_s - a->opened_s;
    a->state = WELCOME, a->backoff_s = FIRST_BACKOFF_S;
    c->num_welcome++;
    int size = make_report(s, a, a->settled, 1, now_s, packet);
    a->connection_window -= size - 9, a->stream_window -= size - 9;
    a->sent = a->settled;
    write_out(s, a, packet, size, now_s);
    speak(s, a, now_s);
}

/* One AttachResponse. */
static void hear(Swarm *s, Agent *a, const uint8_t *at, int size, double now_s) {
    const uint8_t *end = at + size;
    while (at < end) {
        uint64_t tag = varint_at(&at, end), length;
        if ((tag & 7) == 0) {
            varint_at(&at, end);
            continue;
        }
        length = varint_at(&at, end);
        if (tag >> 3 == 1) {
            welcomed(s, a, now_s);
            if (a->state == AWAY) return;
        } else if (tag >> 3 == 2 && length) {
            const uint8_t *inner = at + 1;
            uint64_t sequence = varint_at(&inner, end);
            if (sequence > a->settled) {
                s->counts.acknowledged += sequence - a->settled;
                a->settled = sequence;
                if (a->sent < sequence) a->sent = sequence;
            }
        } else {
            s->counts.commands++;
        }
        at += length;
    }
}

static void take_frame(Swarm *s, Agent *a, uint8_t *f, int size, double now_s) {
    int kind = f[3], flags = f[4], stream = f[8];
    uint8_t *load = f + 9, reply[64];
    uint32_t value = size >= 4 ? (uint32_t)load[0] << 24 | load[1] << 16 | load[2] << 8 | load[3] : 0;
    if (kind == DATA) {
        append(&a->said, &a->said_size, &a->said_room, load, size);
    } else if (kind == SETTINGS && !(flags & 1)) {
        for (int i = 0; i + 6 <= size; i += 6) {
            uint32_t told = (uint32_t)load[i + 2] << 24 | load[i + 3] << 16 | load[i + 4] << 8 |
                            load[i + 5];
            if (load[i + 1] == 4) {
                a->stream_window += (int64_t)told - a->initial_window;
                a->initial_window = told;
            }
        }
        frame_head(reply, 0, SETTINGS, 1, 0);
        write_out(s, a, reply, 9, now_s);
    } else if (kind == PING && !(flags & 1) && size == 8) {
        frame_head(reply, 8, PING, 1, 0);
        memcpy(reply + 9, load, 8);
        write_out(s, a, reply, 17, now_s);
    } else if (kind == WINDOW) {
        *(stream ? &a->stream_window : &a->connection_window) += value & 0x7FFFFFFF;
    }
    if (kind == RST || kind == GOAWAY || ((kind == DATA || kind == HEADERS) && flags & 1))
        a->is_broken = 1;
}

static void serve(Swarm *s, Agent *a, uint32_t events, double now_s) {
    uint8_t data[1 << 16];
    if (a->state == AWAY) return;
    if (events & EPOLLOUT || a->waits_in) {
        if (a->out_size) write_out(s, a, 0, 0, now_s);
        if (a->state == AWAY) return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = get(a, data, sizeof data);
    if (got < 0 && errno == EAGAIN) return;
    if (got > 0) append(&a->in, &a->in_size, &a->in_room, data, got);
    int at = 0;
    while (a->state != AWAY && a->in_size - at >= 9) {
        int size = a->in[at] << 16 | a->in[at + 1] << 8 | a->in[at + 2];
        if (a->in_size - at < 9 + size) break;
        take_frame(s, a, a->in + at, size, now_s);
        at += 9 + size;
    }
    if (a->state == AWAY) return;
    memmove(a->in, a->in + at, a->in_size - at);
    a->in_size -= at;
    at = 0;
    while (a->state != AWAY && a->said_size - at >= 5) {
        int size = a->said[at + 1] << 24 | a->said[at + 2] << 16 | a->said[at + 3] << 8 |
                   a->said[at + 4];
        if (a->said_size - at < 5 + size) break;
        hear(s, a, a->said + at + 5, size, now_s);
        at += 5 + size;
    }
    if (a->state == AWAY) return;
    memmove(a->said, a->said + at, a->said_size - at);
    a->said_size -= at;
    if (got <= 0 || a->is_broken)
        lose(s, a, now_s);
    else
        speak(s, a, now_s); /* windows may be wider now */
}

/* --- what Python calls --- */

Swarm *swarm_new(int port, int num, double period_s, double spread_s, int device_every,
                 int step_every) {
    Swarm *s = calloc(1, sizeof *s);
    s->agents = calloc(num, sizeof *s->agents);
    s->heap = calloc(num, sizeof *s->heap);
    s->num = num, s->period_s = period_s, s->spread_s = spread_s, s->random = 88172645463325252ull + num;
    s->device_every = device_every, s->step_every = step_every;
    s->address.sin_family = AF_INET, s->address.sin_port = htons(port);
    s->address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    s->poll = epoll_create1(0), s->probe = -1;
    for (int i = 0; i < num + NUM_PROBES; i++) {
        Agent *a = i < num ? &s->agents[i] : &s->probes[i - num];
        a->fd = -1, a->backoff_s = FIRST_BACKOFF_S, a->phase_s = i * period_s / num;
    }
    s->lap_s = now(), s->next_probe_s = s->lap_s + PROBE_PERIOD_S;
    return s;
}

Counts *swarm_counts(Swarm *s) { return &s->counts; }

void swarm_open_with(Swarm *s, const uint8_t *opening, int size) {
    s->opening = malloc(size), s->opening_size = size;
    memcpy(s->opening, opening, size);
}

/* Part `which`: 0 hello, 1 greeting, 2 devices, 3.. steps, then a loss; of agent -1: the kernel's. */
void swarm_part(Swarm *s, int agent, int which, const uint8_t *bytes, int size, const int32_t *times,
                int num_times, const int32_t *numbers, int num_numbers) {
    Agent *a = agent < s->num ? &s->agents[agent] : &s->probes[agent - s->num];
    Part *p = agent < 0 ? &s->kernel : which == 0 ? &a->hello : which == 1 ? &a->greeting
            : which == 2 ? &a->devices : which < 3 + STEP_VARIANTS ? &a->step[which - 3] : &a->loss;
    *p = (Part){malloc(size + 1), size, num_times, num_numbers,
                malloc(4 * num_times + 1), malloc(4 * num_numbers + 1)};
    memcpy(p->bytes, bytes, size);
    memcpy(p->times, times, 4 * num_times);
    memcpy(p->numbers, numbers, 4 * num_numbers);
}

void swarm_attach_within(Swarm *s, double spread_s) {
    double now_s = now();
    for (int i = 0; i < s->num; i++) try_at(s, i, now_s + uniform(s) * spread_s);
}

void swarm_drop_all(Swarm *s) {
    double now_s = now();
    for (int i = 0; i < s->num; i++) lose(s, &s->agents[i], now_s);
}

int64_t swarm_num_waiting(Swarm *s) {
    int64_t waiting = 0;
    for (int i = 0; i < s->num; i++) waiting += s->agents[i].sequence - s->agents[i].settled;
    return waiting;
}

/* Its report after so many tells its loss, once. */
void swarm_lose(Swarm *s, int agent, int reports) {
    s->agents[agent].loss_at = s->agents[agent].sequence + reports;
}

void swarm_mark(Swarm *s) {
    for (int i = 0; i < s->num; i++) s->agents[i].goal = s->agents[i].sequence;
}

/* How many wait for an acknowledgement of what they had told at the mark. */
int swarm_num_behind(Swarm *s) {
    int behind = 0;
    for (int i = 0; i < s->num; i++) behind += s->agents[i].settled < s->agents[i].goal;
    return behind;
}

void swarm_run(Swarm *s, double for_s) {
    static struct epoll_event events[4096];
    double began_s = now(), now_s;
    while ((now_s = now()) < began_s + for_s) {
        for (;;) { /* reports that are due, attached or not */
            Agent *a = &s->agents[s->at];
            double due_s = s->lap_s + a->phase_s;
            if (due_s > now_s) break;
            if (now_s - due_s > s->counts.late_s) s->counts.late_s = now_s - due_s;
            if (a->sequence || a->state == WELCOME) { /* it begins once it was attached */
                if (!a->sequence) a->first_s = due_s;
                a->sequence++, s->counts.made++;
                speak(s, a, now_s);
            }
            if (++s->at == s->num) s->at = 0, s->lap_s += s->period_s;
        }
        for (int i = 0; i < OPENED_AT_ONCE && s->heap_size; i++) {
            if (s->agents[s->heap[0]].retry_s > now_s) break;
            open_one(s, &s->agents[next_try(s)], now_s);
        }
        if (now_s >= s->next_probe_s) { /* what a newcomer waits is what everybody waits */
            s->next_probe_s = now_s + PROBE_PERIOD_S;
            if (s->probe < 0) {
                s->probe = s->probes_made++ % NUM_PROBES;
                open_one(s, &s->probes[s->probe], now_s);
            }
        }
        int num = epoll_wait(s->poll, events, 4096, 1);
        now_s = now();
        for (int i = 0; i < num; i++) {
            int number = events[i].data.u32;
            Agent *a = number < s->num ? &s->agents[number] : &s->probes[number - s->num];
            serve(s, a, events[i].events, now_s);
        }
    }
}

void swarm_close(Swarm *s) {
    for (int i = 0; i < s->num; i++) forget(s, &s->agents[i]);
    for (int i = 0; i < NUM_PROBES; i++) forget(s, &s->probes[i]);
    close(s->poll);
}
