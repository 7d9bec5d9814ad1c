/* Sums of the rows of a text's words in a supervised fastText model: see models/word_vectors.py.

Whole numbers only, so that a sum is the same in any order. A word's rows are its own, if the
dictionary has it, and one for each of its character n-grams (32-bit FNV-1a over signed bytes,
modulo the number of buckets). Sums of short words are kept in a table of fixed size, in which
a word takes the place of another: what stands in it never changes a result. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define SHORT_BYTES 39   /* of a word that is kept */
#define HEAD_BYTES 48    /* of an entry: hash, length, word */
#define STACK_BYTES 1024 /* a longer word is copied to the heap */
#define SKIPPED (-1)
#define UNKNOWN (-2)

typedef struct {
    PyObject_HEAD
    int dim, minn, maxn;
    uint32_t bucket;
    int64_t first_ngram;
    Py_buffer table;     /* int32, or float32 at any alignment, row by row */
    double scale;        /* 0: the table holds whole numbers; else steps in one */
    Py_buffer buckets;   /* of a pruned model: int32, the row of each bucket, or -1 */
    uint8_t *known;      /* a bit for each bucket: whether it has a row */
    PyObject *words;     /* bytes: the dictionary's words, each with its length before it */
    int64_t *places;     /* hash table of the dictionary: offset into `words` + 1 */
    int32_t *rows;
    uint64_t place_mask;
    unsigned char *kept; /* table of entries */
    size_t entry_bytes;
    uint64_t kept_mask;
    uint64_t used;
} WordSums;

static uint64_t hash_of(const unsigned char *word, Py_ssize_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (Py_ssize_t i = 0; i < size; i++)
        hash = (hash ^ word[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t slot_of(uint64_t hash)
{
    return hash ^ (hash >> 29) ^ (hash >> 43);
}

static int32_t own_row(const WordSums *self, const unsigned char *word, Py_ssize_t size,
                       uint64_t hash)
{
    const char *words = PyBytes_AS_STRING(self->words);
    for (uint64_t slot = slot_of(hash) & self->place_mask;; slot = (slot + 1) & self->place_mask) {
        int64_t place = self->places[slot];
        if (place == 0)
            return UNKNOWN;
        int64_t length;
        memcpy(&length, words + place - 1, sizeof length);
        if (length == size && memcmp(words + place - 1 + sizeof length, word, size) == 0)
            return self->rows[slot];
    }
}

static void add_row(const WordSums *self, int64_t row, int64_t *sum)
{
    const int dim = self->dim;
    const char *values = (const char *)self->table.buf + row * dim * 4;
    if (self->scale == 0) {
        const int32_t *whole = (const int32_t *)values;
        for (int d = 0; d < dim; d++)
            sum[d] += whole[d];
    } else {
        const double rounding = 6755399441055744.0; /* 1.5 * 2**52: adding it rounds to even */
        for (int d = 0; d < dim; d++) {
            float value;
            memcpy(&value, values + 4 * d, sizeof value);
            double shifted = (double)value * self->scale + rounding;
            sum[d] += (int64_t)(shifted - rounding);
        }
    }
    sum[dim]++;
}

static void add_ngrams(const WordSums *self, const unsigned char *marked, Py_ssize_t size,
                       int64_t *sum)
{
    const int32_t *buckets = self->buckets.buf;
    for (Py_ssize_t i = 0; i < size; i++) {
        if ((marked[i] & 0xC0) == 0x80)
            continue;
        uint32_t hash = 2166136261u;
        Py_ssize_t end = i;
        for (int n = 1; n <= self->maxn && end < size; n++) {
            do {
                hash = (hash ^ (uint32_t)(int8_t)marked[end]) * 16777619u;
                end++;
            } while (end < size && (marked[end] & 0xC0) == 0x80);
            if (n < self->minn || (n == 1 && (i == 0 || end == size)))
                continue;
            uint32_t bucket = hash % self->bucket;
            if (buckets == NULL)
                add_row(self, self->first_ngram + bucket, sum);
            else if (self->known[bucket >> 3] >> (bucket & 7) & 1)
                add_row(self, buckets[bucket], sum);
        }
    }
}

/* Adds the rows of a word to `sum` (dim, and how many they are). -1: no memory. */
static int add_word(const WordSums *self, const unsigned char *word, Py_ssize_t size,
                    uint64_t hash, int64_t *sum)
{
    int32_t own = own_row(self, word, size, hash);
    if (own == SKIPPED)
        return 0;
    if (own >= 0)
        add_row(self, own, sum);
    if (self->maxn <= 0 || (size == 4 && memcmp(word, "</s>", 4) == 0))
        return 0;
    if (own < 0 && size >= 9 && memcmp(word, "__label__", 9) == 0)
        return 0;
    unsigned char stack[STACK_BYTES];
    unsigned char *marked = stack;
    if (size + 2 > STACK_BYTES && (marked = PyMem_Malloc(size + 2)) == NULL)
        return -1;
    marked[0] = '<';
    memcpy(marked + 1, word, size);
    marked[size + 1] = '>';
    add_ngrams(self, marked, size + 2, sum);
    if (marked != stack)
        PyMem_Free(marked);
    return 0;
}

static int is_space(unsigned char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || c == 0;
}

/* Adds the vectors of all words of a line to `sum`; `scratch` has room for one. */
static int add_line(WordSums *self, const unsigned char *at, const unsigned char *end,
                    int64_t *sum, int64_t *scratch)
{
    const int width = self->dim + 1;
    while (at < end) {
        if (is_space(*at)) {
            at++;
            continue;
        }
        const unsigned char *word = at;
        while (at < end && !is_space(*at))
            at++;
        Py_ssize_t size = at - word;
        uint64_t hash = hash_of(word, size);
        if (size > SHORT_BYTES) {
            if (add_word(self, word, size, hash, sum) < 0)
                return -1;
            continue;
        }
        unsigned char *entry = self->kept + (slot_of(hash) & self->kept_mask) * self->entry_bytes;
        int32_t *vector = (int32_t *)(entry + HEAD_BYTES);
        uint64_t held;
        memcpy(&held, entry, sizeof held);
        if (held != hash || entry[8] != size || memcmp(entry + 9, word, size) != 0) {
            memset(scratch, 0, width * sizeof *scratch);
            if (add_word(self, word, size, hash, scratch) < 0)
                return -1;
            self->used += entry[8] == 0;
            memcpy(entry, &hash, sizeof hash);
            entry[8] = (unsigned char)size;
            memcpy(entry + 9, word, size);
            for (int d = 0; d < width; d++)
                vector[d] = (int32_t)scratch[d];
        }
        for (int d = 0; d < width; d++)
            sum[d] += vector[d];
    }
    return 0;
}

static PyObject *word_sums_add(WordSums *self, PyObject *args)
{
    PyObject *lines;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "O!w*", &PyList_Type, &lines, &out))
        return NULL;
    const Py_ssize_t width = self->dim + 1;
    const Py_ssize_t count = PyList_GET_SIZE(lines);
    int64_t *scratch = NULL;
    PyObject *result = NULL;
    if (out.len != count * width * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "`out` is not int64 of shape (lines, dim + 1)");
        goto done;
    }
    if ((scratch = PyMem_Malloc(width * sizeof *scratch)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *line = PyList_GET_ITEM(lines, i);
        if (!PyBytes_Check(line)) {
            PyErr_SetString(PyExc_TypeError, "lines are bytes");
            goto done;
        }
        const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(line);
        if (add_line(self, at, at + PyBytes_GET_SIZE(line), (int64_t *)out.buf + i * width,
                     scratch) < 0) {
            PyErr_NoMemory();
            goto done;
        }
    }
    result = Py_NewRef(Py_None);
done:
    PyMem_Free(scratch);
    PyBuffer_Release(&out);
    return result;
}

static int fill_dictionary(WordSums *self, PyObject *entries)
{
    Py_ssize_t bytes = 0, count = PyList_GET_SIZE(entries);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *word;
        int row;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(entries, i), "Si", &word, &row))
            return -1;
        if (row < SKIPPED || row >= self->first_ngram) {
            PyErr_SetString(PyExc_ValueError, "a word's row is not one of the words' rows");
            return -1;
        }
        bytes += (Py_ssize_t)sizeof(int64_t) + PyBytes_GET_SIZE(word);
    }
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    self->place_mask = slots - 1;
    self->words = PyBytes_FromStringAndSize(NULL, bytes);
    self->places = PyMem_Calloc(slots, sizeof *self->places);
    self->rows = PyMem_Calloc(slots, sizeof *self->rows);
    if (self->words == NULL || self->places == NULL || self->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    char *start = PyBytes_AS_STRING(self->words), *at = start;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *word = PyTuple_GET_ITEM(PyList_GET_ITEM(entries, i), 0);
        int64_t length = PyBytes_GET_SIZE(word);
        memcpy(at, &length, sizeof length);
        memcpy(at + sizeof length, PyBytes_AS_STRING(word), length);
        uint64_t hash = hash_of((unsigned char *)PyBytes_AS_STRING(word), length);
        uint64_t slot = slot_of(hash) & self->place_mask;
        while (self->places[slot] != 0) /* words differ from each other */
            slot = (slot + 1) & self->place_mask;
        self->places[slot] = at - start + 1;
        self->rows[slot] = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(PyList_GET_ITEM(entries, i), 1));
        at += sizeof length + length;
    }
    return 0;
}

/* Every row that a bucket names must be in the table: a model file may be damaged. */
static int check_buckets(WordSums *self, int64_t table_rows)
{
    if (self->buckets.buf == NULL) {
        if (self->maxn > 0 && self->first_ngram + (int64_t)self->bucket > table_rows)
            return -1;
        return 0;
    }
    if (self->buckets.len != (Py_ssize_t)self->bucket * 4)
        return -1;
    self->known = PyMem_Calloc((size_t)self->bucket / 8 + 1, 1);
    if (self->known == NULL)
        return -1;
    const int32_t *rows = self->buckets.buf;
    for (uint32_t bucket = 0; bucket < self->bucket; bucket++) {
        if (rows[bucket] < -1 || rows[bucket] >= table_rows)
            return -1;
        if (rows[bucket] >= 0)
            self->known[bucket >> 3] |= (uint8_t)(1 << (bucket & 7));
    }
    return 0;
}

static PyObject *word_sums_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"dim", "minn", "maxn", "bucket", "first_ngram", "table", "scale",
                            "buckets", "entries", "slots", NULL};
    PyObject *table, *buckets, *entries;
    Py_ssize_t slots;
    WordSums *self = (WordSums *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    long long first_ngram;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiiILOdOO!n", names, &self->dim, &self->minn,
                                     &self->maxn, &self->bucket, &first_ngram, &table,
                                     &self->scale, &buckets, &PyList_Type, &entries, &slots))
        goto failed;
    self->first_ngram = first_ngram;
    if (self->dim < 1 || slots < 1 || (slots & (slots - 1)) != 0 || first_ngram < 0
        || (self->maxn > 0 && self->bucket < 1)) {
        PyErr_SetString(PyExc_ValueError, "dim, slots, first_ngram or bucket is not valid");
        goto failed;
    }
    if (PyObject_GetBuffer(table, &self->table, PyBUF_C_CONTIGUOUS) < 0)
        goto failed;
    if (buckets != Py_None && PyObject_GetBuffer(buckets, &self->buckets, PyBUF_C_CONTIGUOUS) < 0)
        goto failed;
    int64_t table_rows = self->table.len / (4 * (int64_t)self->dim);
    if (first_ngram > table_rows || check_buckets(self, table_rows) < 0) {
        PyErr_SetString(PyExc_ValueError, "rows are named that the table has not");
        goto failed;
    }
    if (fill_dictionary(self, entries) < 0)
        goto failed;
    self->entry_bytes = (HEAD_BYTES + 4 * ((size_t)self->dim + 1) + 7) / 8 * 8;
    self->kept_mask = (uint64_t)slots - 1;
    self->kept = PyMem_Calloc((size_t)slots, self->entry_bytes);
    if (self->kept == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void word_sums_free(WordSums *self)
{
    if (self->table.obj != NULL)
        PyBuffer_Release(&self->table);
    if (self->buckets.obj != NULL)
        PyBuffer_Release(&self->buckets);
    Py_XDECREF(self->words);
    PyMem_Free(self->known);
    PyMem_Free(self->places);
    PyMem_Free(self->rows);
    PyMem_Free(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *word_sums_kept(WordSums *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->used);
}

static PyMethodDef word_sums_methods[] = {
    {"add", (PyCFunction)word_sums_add, METH_VARARGS,
     "add(lines: list[bytes], out) adds the sum of each line's words to its row of out."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef word_sums_attributes[] = {
    {"kept", (getter)word_sums_kept, NULL, "How many words are kept.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject WordSumsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "models._word_sums.WordSums",
    .tp_doc = "See models/word_vectors.py.",
    .tp_basicsize = sizeof(WordSums),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = word_sums_new,
    .tp_dealloc = (destructor)word_sums_free,
    .tp_methods = word_sums_methods,
    .tp_getset = word_sums_attributes,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_word_sums", "Sums of word vectors.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__word_sums(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddType(made, &WordSumsType) < 0)
        Py_CLEAR(made);
    return made;
}
