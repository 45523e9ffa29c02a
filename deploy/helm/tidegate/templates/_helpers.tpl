{{/* The release's name for all resources, at most 36 characters: a model's name follows. */}}
{{- define "tidegate.name" -}}
{{- $name := ternary .Release.Name (printf "%s-tidegate" .Release.Name) (contains "tidegate" .Release.Name) -}}
{{- $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{/* A model's name as a part of resource names. */}}
{{- define "tidegate.slug" -}}
{{- . | lower | replace "." "-" | replace "_" "-" | replace "/" "-" | replace ":" "-" | trunc 18 | trimAll "-" -}}
{{- end -}}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tidegate.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* A model with the defaults of what it leaves out. Maps are merged, so `resources` is taken as a whole if it is set. */}}
{{- define "tidegate.model" -}}
{{- $own := deepCopy (.own | default dict) -}}
{{- $defaults := omit (deepCopy .root.Values.modelDefaults) (hasKey $own "resources" | ternary "resources" "") -}}
{{- $defaults = omit $defaults (hasKey $own "cache" | ternary "cache" "") -}}
{{- mergeOverwrite $defaults $own | toYaml -}}
{{- end -}}

{{/* Seconds from the stop signal to SIGKILL: the drain, and what follows it. */}}
{{- define "tidegate.grace" -}}
{{ add (ceil .) 20 }}
{{- end -}}

{{/* "yes" if KEDA may stop all workers of a model. */}}
{{- define "tidegate.fromZero" -}}
{{- $found := "" -}}
{{- range $name, $own := .Values.models -}}
{{- $model := include "tidegate.model" (dict "root" $ "own" $own) | fromYaml -}}
{{- if and $model.autoscaling.enabled (eq (int $model.autoscaling.minReplicas) 0) }}{{ $found = "yes" }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{- define "tidegate.hasKeys" -}}
{{- if or .Values.auth.apiKeys .Values.auth.operatorKey }}yes{{ end -}}
{{- end -}}

{{- define "tidegate.ownStore" -}}
{{- if not (or .Values.store.url .Values.store.urlSecret) }}yes{{ end -}}
{{- end -}}

{{- define "tidegate.hasTiers" -}}
{{- $found := .Values.tiers -}}
{{- range .Values.models }}{{ $found = or $found (. | default dict).tiers }}{{ end -}}
{{- if $found }}yes{{ end -}}
{{- end -}}

{{/* What all parts of Tidegate have in their environment. */}}
{{- define "tidegate.env" -}}
- name: TIDEGATE_REDIS_URL
{{- if .Values.store.urlSecret }}
  valueFrom: {secretKeyRef: {name: {{ .Values.store.urlSecret.secret }}, key: {{ .Values.store.urlSecret.key }}}}
{{- else if .Values.store.url }}
  value: {{ .Values.store.url | quote }}
{{- else }}
  value: redis://{{ include "tidegate.name" . }}-store:6379/0{{ if .Values.store.valkey.passwordSecret }}?password_file=/etc/tidegate/store/password{{ end }}
{{- end }}
- {name: TIDEGATE_LOG_LEVEL, value: {{ .Values.logLevel }}}
- {name: TIDEGATE_LOG_FORMAT, value: json}
- {name: HOME, value: /var/lib/tidegate}
{{- with .Values.hubToken }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}
{{- end -}}

{{/* Volumes and mounts that gateways and workers have in common. */}}
{{- define "tidegate.mounts" -}}
- {name: data, mountPath: /var/lib/tidegate}
- {name: tmp, mountPath: /tmp}
{{- if include "tidegate.hasTiers" . }}
- {name: tiers, mountPath: /etc/tidegate/tiers, readOnly: true}
{{- end }}
{{- if and (include "tidegate.ownStore" .) .Values.store.valkey.passwordSecret }}
- {name: store-password, mountPath: /etc/tidegate/store, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tidegate.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if include "tidegate.hasTiers" . }}
- name: tiers
  configMap: {name: {{ include "tidegate.name" . }}-tiers}
{{- end }}
{{- if and (include "tidegate.ownStore" .) .Values.store.valkey.passwordSecret }}
- name: store-password
  secret:
    secretName: {{ .Values.store.valkey.passwordSecret.secret }}
    items: [{key: {{ .Values.store.valkey.passwordSecret.key }}, path: password}]
{{- end }}
{{- end -}}

{{/* What the pods of gateways and workers have in common. enableServiceLinks: Kubernetes would set variables such as
     TIDEGATE_PORT to addresses of Services, and Tidegate reads settings from these names. */}}
{{- define "tidegate.pod" -}}
automountServiceAccountToken: {{ .Values.mountServiceAccountToken }}
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tidegate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tidegate.placement" -}}
{{- $set := dict -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "runtimeClassName" "priorityClassName" -}}
{{- with index $ $key }}{{ $_ := set $set $key . }}{{ end -}}
{{- end -}}
{{- if $set }}{{ toYaml $set }}{{ end -}}
{{- end -}}

{{/* Stop with a message if `extraArgs` has a flag that the chart itself sets. */}}
{{- define "tidegate.checkArgs" -}}
{{- range $arg := .extra -}}
{{- $flag := (splitList "=" $arg) | first -}}
{{- if has $flag $.own }}{{ fail (printf "%s: %s is set by the chart; docs/kubernetes.md names the value for it" $.where $flag) }}{{ end -}}
{{- end -}}
{{- end -}}
